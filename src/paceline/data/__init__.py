"""From text to tokens to micro-batches.

    once         find, sources (hub) -> documents (text, parquet) -> tokenizer (sample), encode -> parts -> shard
                 prepare runs it, config (Recipe) says how, cache says where
    each step    stream, dataset (foreign) -> mixture (packing, order) -> plan -> loader

`plan` and `loader` get rank and world size as integers; nothing here communicates.

Once, with three files of 10, 40 and 1 MB and two workers: five parts, a.jsonl, three ranges of b.jsonl, and c.txt.
Each worker takes the next part and writes its tokens; of all parts, in order, the shards are made, which so do not
depend on the number of workers or hosts.

Each step, with 4 ranks, a batch of 8 sequences in micro-batches of 2, and T = 256: positions 8 to 15 of the run are
step 1, and rank 2 has the positions 12 and 13. The mixture says which dataset has position 12 and how many of its
sequences came before; the permutation of that epoch says which sequence it is, say number 731 of the web data: the
tokens 187,136 to 187,392 of its training stream. Rank 2 reads these 257 tokens from its disk, and nothing else. On 2
ranks rank 1 would read them, at the same step; so the curve does not depend on the number of ranks.
"""
