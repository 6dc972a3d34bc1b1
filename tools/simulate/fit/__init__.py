"""What a real run says about a fleet, and how a simulated one compares with it.

fitting     a fleet from a request log
core_fit    what steps cost on cores that workers share, from a profile
likeness    a real run and its replay side by side
"""
