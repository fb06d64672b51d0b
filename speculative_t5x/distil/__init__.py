"""Distillation of a draft: training it on a target's outputs and distributions (DistillSpec)."""
