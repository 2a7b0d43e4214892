"""Station 1, text to tokens. A token meets corpora, tokenizer, shard, prepare, dataset, order, plan, loader.

Nothing here knows of ranks as processes: `plan` and `loader` are told a rank and a world size as plain integers.
"""
