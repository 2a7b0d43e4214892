"""Beside the flow: models that come from elsewhere, and ours for others. JSON and safetensors; no transformers.

A model that was imported is a run folder at step 0, so whatever reads runs reads it.
"""
