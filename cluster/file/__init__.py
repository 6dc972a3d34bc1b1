"""`cluster.yaml`: a whole cluster in one file, for `twostroke up -f`.

text     reads YAML and keeps the line of every value
cluster  turns values into the config that flags would give; errors name file, line and key
"""
