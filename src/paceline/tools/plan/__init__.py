"""Predicts memory, time and cost of a training run on a described cluster."""
