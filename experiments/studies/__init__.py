"""Studies: ablations, baselines, gradient estimators and sampling complexity."""
