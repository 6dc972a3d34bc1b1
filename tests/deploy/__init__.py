"""What is deployed, checked without a cluster: manifests, rules, dashboards, scripts, images."""
