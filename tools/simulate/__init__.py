"""`twostroke simulate`: policies and fleets in virtual time.

command     flags to a session, or to one of `plan` and `scale`
session     policies against the same requests          loads       the pace that makes a fleet as busy as asked for
options     flags that all of these share               variants    policies by name
runs        several simulations side by side
traces/     requests: recorded and generated            fleet/      the simulation itself
planning/   how many workers a load needs               reports/    numbers, tables, JSON, HTML
fit/        a fleet from a real run, and that run replayed
rivals/     routing policies of other systems
"""
