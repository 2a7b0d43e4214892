"""Imports models that were trained elsewhere and exports ours: JSON and safetensors, without transformers.

An imported model is a run folder at step 0, so every command that reads runs can read it.
"""
