"""`cluster.yaml`: a whole cluster in one file, for `twostroke up -f`.

text     YAML, every value with its line (`text.py`)
keys     which keys there are: the flags of `twostroke serve`, in sections, and what a role's workers ask of nodes
cluster  values become the same config as flags do; what is wrong is named by file, line and key
"""
