"""What others take for the attention that gpu_bench measures: torch's scaled_dot_product_attention on an uncompressed bf16
cache, and FlashInfer where it can be imported. Prints JSON; started by scripts/gpu-check.

The shapes are gpu_bench's: 8 kv_heads, groups of 4, head_dim 128, as many layers as no cache holds. Of agents: 1, and 16
that read the same document, for whom the queries of all agents are rows over one shared cache (the best that plain attention can do),
and FlashInfer's cascade is that by itself. Each result is compared with plain arithmetic first.
"""

import argparse
import json
import statistics
import sys
import time

KV_HEADS, GROUP, HEAD_DIM = 8, 4, 128
DEVICE = "cuda"


def median_ms(torch, rounds, work):
    for _ in range(2):
        work()
    times = []
    if DEVICE == "cpu":  # for trying this program without a GPU
        for _ in range(rounds):
            start = time.perf_counter()
            work()
            times.append((time.perf_counter() - start) * 1e3)
        return statistics.median(times)
    torch.cuda.synchronize()
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def torch_ways(torch, q):
    """q: [agents, kv_head, group, dim]. Functions of (k, v) of [kv_head, token, dim] that give [kv_head, rows, dim]."""
    attend = torch.nn.functional.scaled_dot_product_attention
    agents = q.shape[0]
    rows = q.transpose(0, 1).reshape(1, KV_HEADS, agents * GROUP, HEAD_DIM).contiguous()
    heads = q.reshape(agents, KV_HEADS * GROUP, 1, HEAD_DIM)

    def as_rows(k, v):
        return attend(rows, k[None], v[None])[0]

    def as_heads(k, v):
        out = attend(heads, k[None].expand(agents, -1, -1, -1), v[None].expand(agents, -1, -1, -1), enable_gqa=True)
        return out.reshape(agents, KV_HEADS, GROUP, HEAD_DIM).transpose(0, 1).reshape(KV_HEADS, -1, HEAD_DIM)

    return {"rows": as_rows, "enable_gqa": as_heads}


def flashinfer_ways(torch, q):
    try:
        import flashinfer
    except ImportError as error:
        print(f"peers: flashinfer unavailable: {error}", file=sys.stderr)
        return {}
    if q.shape[0] == 1:
        query = q.reshape(KV_HEADS * GROUP, HEAD_DIM)
        return {"flashinfer": lambda k, v: flashinfer.single_decode_with_kv_cache(
            query, k, v, kv_layout="HND").reshape(KV_HEADS, GROUP, HEAD_DIM)}
    rows = q.reshape(q.shape[0], KV_HEADS * GROUP, HEAD_DIM)
    return {"flashinfer": lambda k, v: flashinfer.single_prefill_with_kv_cache(
        rows, k, v, causal=False, kv_layout="HND").reshape(q.shape).transpose(0, 1).reshape(KV_HEADS, -1, HEAD_DIM)}


def measure(torch, tokens, agents, rounds, mib):
    layer_bytes = 2 * KV_HEADS * tokens * HEAD_DIM * 2
    layers = max(2, (mib << 20) // layer_bytes + 1)
    torch.manual_seed(1)
    caches = [tuple(torch.randn(KV_HEADS, tokens, HEAD_DIM, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
              for _ in range(layers)]
    q = torch.randn(agents, KV_HEADS, GROUP, HEAD_DIM, device=DEVICE, dtype=torch.bfloat16)
    k, v = caches[0]
    rows = q.transpose(0, 1).reshape(KV_HEADS, -1, HEAD_DIM).float()
    want = torch.softmax(rows @ k.float().transpose(1, 2) / HEAD_DIM**0.5, dim=-1) @ v.float()
    for way, attend in {**torch_ways(torch, q), **flashinfer_ways(torch, q)}.items():
        row = {"tokens": tokens, "agents": agents, "way": way}
        try:
            error = ((attend(k, v).float() - want).norm() / want.norm()).item()
            if not error < 0.02:
                row["unavailable"] = f"its result is off by {error:.3g}"
            else:
                row["ms_per_layer"] = median_ms(torch, rounds, lambda: [attend(*cache) for cache in caches]) / layers
        except Exception as error:  # a way that this version lacks is not the end of the others
            row["unavailable"] = str(error).splitlines()[0]
        yield row


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", default="32768,8192,131072")
    parser.add_argument("--agents", default="1,16")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", help="file for the rows instead of standard output; written after each document's size")
    options = parser.parse_args()
    global DEVICE
    DEVICE = options.device
    try:
        import torch
    except ImportError as error:
        print(f"unavailable: no torch: {error}")
        sys.exit(77)
    if DEVICE == "cuda" and not torch.cuda.is_available():
        print("unavailable: torch sees no GPU")
        sys.exit(77)
    rows = []
    for tokens in map(int, options.tokens.split(",")):
        for agents in map(int, options.agents.split(",")):
            rows += measure(torch, tokens, agents, options.rounds, options.mib)
        report = json.dumps({"torch": torch.__version__, "rows": rows,
                             "gpu": torch.cuda.get_device_name() if DEVICE == "cuda" else "none"}, indent=1)
        if options.json:
            with open(options.json, "w") as file:
                file.write(report)
    if not options.json:
        print(report)


if __name__ == "__main__":
    main()
