"""What is shown of simulated runs.

summary   a run in the numbers by which policies are compared
report    tables and JSON
page      one HTML page
"""
