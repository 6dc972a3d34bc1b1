"""The draft model of a decode worker, between the steps of its model.

branch        what it gives the worker: its pages, its costs, drafts before steps
model_drafts  what it computes before each step
"""
