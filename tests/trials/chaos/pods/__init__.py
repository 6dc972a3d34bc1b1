"""An overlay's pods, run on one machine as their manifests say, without Kubernetes.

manifests  what `kubectl kustomize` renders, and what ConfigMaps, Secrets and Services in it mean to a pod
kuberay    the pods that KubeRay makes of a RayCluster
pod        a pod out of namespaces: an address, volumes, containers with a read-only root and no privilege
kubelet    starts pods, asks their probes, runs preStop and ends them within their grace period
run        `python -m tests.trials.chaos.pods.run OVERLAY`: all of it, a request, an eviction, a launcher that dies
"""
