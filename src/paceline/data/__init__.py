"""From text to tokens to micro-batches.

    once         find, sources (hub) -> blocks, text -> tokenizer, encode, workers -> split, build, shard
                 prepare runs it, config (Recipe) says how, cache says where
    each step    stream, dataset (foreign, content) -> sequences (packing), blend (mixture) -> order, plan -> loader

`plan` and `loader` get rank and world size as integers; nothing here communicates.
"""
