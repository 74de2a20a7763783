#!/bin/sh
# Prints dashboards/prometheus/rules as PrometheusRules: sh dashboards/kubernetes/rules.sh | kubectl apply -f -
set -eu
cd "$(dirname "$0")/../prometheus/rules"
for file in *.yml; do
    cat <<END
---
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: hilbert-$(basename "$file" .yml | tr _ -)
  labels: { app.kubernetes.io/part-of: hilbert-monitor }
spec:
END
    sed 's/^/  /' "$file"
done
