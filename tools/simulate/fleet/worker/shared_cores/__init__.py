"""The cores of one host that simulated workers share: whose step runs on which, and how long it takes there."""
