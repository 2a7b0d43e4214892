"""The update: from summed gradients to new weights. No collectives: every rank computes the same."""
