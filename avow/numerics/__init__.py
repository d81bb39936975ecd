"""Mathematics on tensors: it knows rows, weights and rounding, and nothing of methods.

What every method stands on:
    rounding          the rounding model: units, sums, products, exponentials
    kernel_rounding   what kernels of linear attention round besides
    cpu_sums          how this CPU's fused attention adds up, seen from its rounding
    norms             norms of rows and matrices, proved; nan and inf are looked for here alone
    masks             what a row sees
    heads             heads that share keys, values of any size, the last touch on an answer
    softmax           softmax averages by their definition: the truth
Sums over keys in linear time:
    scan              one state, one pass, no overflow, and what a pass costs
    features          random features, the frames they live in, and how many a tolerance needs
    cholesky          features by landmarks, and what landmarks leave over
    horizons          averages of all that lies behind a row
Tokens that are left unread:
    sketch            keys in a few bits, with a bound on every product
    brackets          weights between two proved ends
    sketched_problem  a problem beside its sketch
    aggregate_error   what many weigh together
    tails             how much of a sum can be left out, or sampled
    token_ranking     which tokens rows leave unread, and how far those can move them
    tail_samples      samples of the rest, and their proof
    gather            averages over the chosen ones
    sparse_reading    the steps: a look, a cut, what is read, and the proof
    shard_steps       steps that one process takes, or many shards together
Proofs:
    intervals         numbers and matrices that carry their own error
"""
