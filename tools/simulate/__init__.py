"""`twostroke simulate`: policies and fleets in virtual time.

command     flags to a session, or to one of `plan` and `scale`
session     policies against the same requests      plan, sizing  the smallest fleet that keeps a promise
fitting     a profile from a real run's log         scale         the planner over a simulated fleet
traces/     requests: recorded and generated        fleet/        the simulation itself
runs        several simulations side by side        oracle        the most that any placement could reuse
summary     a run in numbers                        report, page  tables, JSON, HTML
"""
