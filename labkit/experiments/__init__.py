"""One module per notebook: its cases, how one case is run, what records it leaves."""
