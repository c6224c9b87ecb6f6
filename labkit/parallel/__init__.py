"""Many ranks: launch a function on them, time collectives, train data parallel, sharded and fully
sharded.
"""
