"""The choice of workers for a request.

`prefix_index` knows which worker holds which blocks. `reservations` hold what routers have placed and workers have not
reported yet. `selector` makes a snapshot of both, asks the policy, and reserves what was chosen. A policy is a pure
function; `forecast` predicts the seconds that it compares.
"""
