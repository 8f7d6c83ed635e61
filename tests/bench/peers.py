"""What other programs take for the work of polykv_bench; started by scripts/bench-peers, prints JSON.

Rows of "attention": torch's scaled_dot_product_attention over more layers than a cache holds, a call a layer. Of three
ways to have several heads share a kv_head the fastest counts: enable_gqa, the heads of a group as further query rows,
and, with one head a kv_head, neither. Rows of "restore": the time in which a program makes a document usable again.
"""

import argparse
import json
import os
import socket
import statistics
import sys
import tempfile
import time
import urllib.request

SMOLLM2 = {"layers": 30, "kv_heads": 3, "head_dim": 64}


def numbers(text):
    return [int(part) for part in text.split(",")]


def timed(options, threads, work):
    """Milliseconds of each round, after one that does not count."""
    clock = time.process_time if options.cpu_time else time.perf_counter
    work()
    times = []
    for _ in range(options.rounds):
        start = clock()
        work()
        times.append((clock() - start) * 1e3 / (threads if options.cpu_time else 1))
    return times


def row_of(operation, times, **facts):
    return {"operation": operation, **facts, "rounds": len(times), "median_ms": statistics.median(times),
            "least_ms": min(times), "most_ms": max(times)}


def attention_ways(torch, q, group):
    """Functions of (k, v), each giving [1, head, query, dim]."""
    attend = torch.nn.functional.scaled_dot_product_attention
    kv_heads = q.shape[1] // group
    rows = q.reshape(1, kv_heads, group * q.shape[2], q.shape[3])
    if group == 1:
        return {"plain": lambda k, v: attend(q, k, v)}
    return {
        "enable_gqa": lambda k, v: attend(q, k, v, enable_gqa=True),
        "rows": lambda k, v: attend(rows, k, v).reshape(q.shape),
    }


def attention_row(torch, options, dtype, head_dim, group, query_rows, threads):
    torch.set_num_threads(threads)
    torch_dtype = {"bf16": torch.bfloat16, "f32": torch.float32}[dtype]
    shape = (1, options.kv_heads, options.tokens, head_dim)
    layer_bytes = 2 * options.kv_heads * options.tokens * head_dim * torch_dtype.itemsize
    layer_count = max(1, -(-options.mib * 2**20 // layer_bytes))
    caches = [(torch.randn(shape).to(torch_dtype), torch.randn(shape).to(torch_dtype)) for _ in range(layer_count)]
    q = torch.randn(1, options.kv_heads * group, query_rows, head_dim).to(torch_dtype)
    ways = attention_ways(torch, q, group)
    outputs = [way(*caches[0]).float() for way in ways.values()]
    if any(not torch.allclose(output, outputs[0], atol=2e-2) for output in outputs):
        raise RuntimeError("torch's ways to attend do not agree")
    best = None
    for way, attend in ways.items():
        times = timed(options, threads, lambda attend=attend: [attend(k, v) for k, v in caches])
        if best is None or statistics.median(times) < statistics.median(best[1]):
            best = (way, times)
    row = row_of("attention", best[1], program="torch " + torch.__version__, way=best[0], dtype=dtype,
                 head_dim=head_dim, group=group, query_rows=query_rows, tokens=options.tokens,
                 kv_heads=options.kv_heads, layers=layer_count, threads=threads)
    row["ns_per_token_kv_head"] = row["median_ms"] * 1e6 / (layer_count * options.tokens * options.kv_heads)
    return row


def attention_rows(options):
    import torch
    with torch.inference_mode():
        for dtype in ("bf16", "f32"):
            for head_dim in options.head_dim:
                for query_rows in options.queries:
                    for group in options.group:
                        for threads in options.threads:
                            yield attention_row(torch, options, dtype, head_dim, group, query_rows, threads)


def polykv_llm_rows(options):
    """K and V of one document out of the published package's pool, as its agents take them."""
    import numpy
    import torch
    from polykv import SharedKVPool
    token_count = len(numpy.load(options.ids))
    torch.set_num_threads(options.threads[-1])
    shape = (1, SMOLLM2["kv_heads"], token_count, SMOLLM2["head_dim"])
    pool = SharedKVPool(head_dim=SMOLLM2["head_dim"])
    standard_output, sys.stdout = sys.stdout, sys.stderr  # it prints
    pool.encode([(torch.randn(shape), torch.randn(shape)) for _ in range(SMOLLM2["layers"])])
    sys.stdout = standard_output
    with torch.inference_mode():
        times = timed(options, options.threads[-1], lambda: [pool.get_kv_for_layer(layer) for layer in range(SMOLLM2["layers"])])
    yield row_of("restore", times, program="polykv-llm", tokens=token_count, threads=options.threads[-1], **SMOLLM2)


class LlamaServer:
    """llama.cpp in this process, spoken to over the loopback interface."""

    def __init__(self, options, folder, context):
        import xllamacpp
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        params = xllamacpp.CommonParams()
        params.model.path = options.model
        params.n_ctx = context
        params.n_parallel = 1
        params.n_gpu_layers = 0
        params.cpuparams.n_threads = options.threads[-1]
        params.cpuparams_batch.n_threads = options.threads[-1]
        params.slot_save_path = folder + "/"
        params.endpoint_slots = True
        params.hostnames = ["127.0.0.1"]
        params.port = port
        params.warmup = False
        self.server = xllamacpp.Server(params)
        self.address = self.server.listening_address

    def post(self, path, **body):
        request = urllib.request.Request(self.address + path, json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=1800) as answer:
            return json.load(answer)


def llama_cpp_rows(options):
    """The state of the document's cache (f16) from a file in the page cache, as llama.cpp itself times it."""
    import numpy
    ids = numpy.load(options.ids).tolist()
    with tempfile.TemporaryDirectory() as folder:
        server = LlamaServer(options, folder, len(ids) + 64)
        server.post("/completion", prompt=ids, n_predict=1, cache_prompt=True, id_slot=0)
        saved = server.post("/slots/0?action=save", filename="state")
        times = []
        for _ in range(options.rounds + 1):
            restored = server.post("/slots/0?action=restore", filename="state")
            if restored["n_restored"] < len(ids):
                raise RuntimeError(f"llama.cpp restored {restored['n_restored']} of {len(ids)} tokens")
            times.append(restored["timings"]["restore_ms"])
        yield row_of("restore", times[1:], program="llama.cpp", tokens=len(ids), threads=options.threads[-1],
                     state_bytes=saved["n_written"], **SMOLLM2)


SOURCES = {"attention": attention_rows, "llama.cpp": llama_cpp_rows, "polykv-llm": polykv_llm_rows}


def main():
    parser = argparse.ArgumentParser(prog="bench-peers")
    parser.add_argument("--model", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--ids", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(SOURCES))
    parser.add_argument("--head-dim", type=numbers, default=[128])
    parser.add_argument("--group", type=numbers, default=[1, 4])
    parser.add_argument("--queries", type=numbers, default=[1])
    parser.add_argument("--threads", type=numbers, default=sorted({1, os.cpu_count()}))
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--mib", type=int, default=512, help="of the caches of one row")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cpu-time", action="store_true",
                        help="count time on processors, divided by the threads, as polykv_bench's option does (not llama.cpp)")
    options = parser.parse_args()
    rows = []
    for name in options.only:
        rows.extend(SOURCES[name](options))
    print(json.dumps({"load": os.getloadavg()[0], "rows": rows}, indent=2))
    sys.stdout.flush()
    os._exit(0)  # llama.cpp's threads do not end with the interpreter


if __name__ == "__main__":
    main()
