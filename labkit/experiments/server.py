"""What the server that forks workers imports first: it ends with the session, even while it imports the rest."""

import os

from labkit.guard import end_with

end_with(int(os.environ["LABKIT_SESSION"]))
