"""Trackers of other programs: Weights & Biases, TensorBoard, MLflow, SwanLab, trackio."""
