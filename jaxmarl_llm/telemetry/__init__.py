"""Telemetry of a run: metrics.jsonl, the console panel, TensorBoard, Weights and Biases, and the report.

Nothing here changes what is computed.
"""
