"""Chooses the workers for a request.

`prefix_index` knows which worker holds which blocks. `reservations` are placements that workers have not reported yet.
`selector` makes a snapshot of both, asks the policy, and reserves what was chosen. A policy is a pure function;
`forecast` predicts the seconds that it compares.
"""
