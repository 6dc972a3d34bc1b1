"""Ray: where workers live, who restarts them, and the command line.

Life of `twostroke serve`:

    commands/serve   flags -> ClusterConfig
    launcher         ports free? model here? -> router process, Ray (local or joined), supervisor; waits; tidies up
    supervisor       observe -> plan -> act, for ever: creates worker actors, holds each one's `run()` as its death
                     watch, calls it again with the next incarnation, and tells all watchers of twostroke.v1.Fleet
    plan             the pure part of that: which worker is created or started now, and when to look again
    placement        the pure part of where: node labels, custom resources, shares of GPUs
    ground           what the supervisor stands on: named Ray actors and Ray's key-value store
    actors           a role mounted on a Ray node
    janitor, bound   nothing of a local cluster outlives its launcher, not even one that was killed
"""
