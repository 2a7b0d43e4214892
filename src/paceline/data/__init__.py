"""Station 1, text to tokens to micro-batches.

    once         sources, corpora, blocks (jsonl, hub) -> tokenizer, encode, workers -> build (dedup), shard
                 prepare runs it, recipe says how, cache says where
    each step    stream, dataset (foreign) -> sequences (packing), blend (mixture) -> order, plan -> loader, prefetch

Nothing here knows of ranks as processes: `plan` and `loader` are told a rank and a world size as plain integers.
"""
