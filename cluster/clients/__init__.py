"""Clients of the front doors for programs that want their streams to survive a router.

resuming    goes on at the next router where the last one broke off
"""
