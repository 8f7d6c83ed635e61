"""Joins what gpu_bench and peers.py measured into one table and one JSON file; started by scripts/gpu-check.

    report.py BENCH.json PEERS.json|- OUT.json
"""

import json
import sys

TARGETS = {"attend": 0.8, "decode": 0.8}  # of a copy's bandwidth
LEAST_TOKENS = 32768  # from which the targets count


def best_peer(peers, tokens, agents):
    times = [row["ms_per_layer"] for row in peers.get("rows", [])
             if row["tokens"] == tokens and row["agents"] == agents and "ms_per_layer" in row]
    return min(times, default=None)


def main():
    bench_path, peers_path, out_path = sys.argv[1:]
    with open(bench_path) as file:
        bench = json.load(file)
    peers = {}
    if peers_path != "-":
        with open(peers_path) as file:
            peers = json.load(file)
    print(f"{bench['gpu']}; a copy within the device moves {bench['copy_gb_per_s']:.0f} GB/s, read and written")
    print(f"{'what':8}{'profile':9}{'tokens':>7}{'agents':>7}{'us a layer':>12}{'of copy':>9}{'vs bf16':>9}  target")
    for row in bench["rows"]:
        ratio = None
        is_default = row.get("how") != "without tensor cores"
        if row["operation"] == "attend":
            peer = best_peer(peers, row["tokens"], row["agents"])
            ratio = peer / row["ms_per_layer"] if peer is not None else None
            row["vs_best_bf16"] = ratio
        met = ""
        if not is_default:
            met = row["how"]
        elif row["tokens"] >= LEAST_TOKENS and row["agents"] == 1 and row["operation"] in TARGETS:
            wanted = TARGETS[row["operation"]]
            is_met = row["copy_fraction"] >= wanted and (ratio is None or ratio >= 2.4)
            met = f"{'met' if is_met else 'NOT met'} ({wanted}{', 2.4' if ratio is not None else ''})"
        elif row["tokens"] >= LEAST_TOKENS and row["agents"] > 1 and ratio is not None:
            met = f"{'met' if ratio >= 2 else 'NOT met'} (2)"
        print(f"{row['operation']:8}{row['profile']:9}{row['tokens']:>7}{row['agents']:>7}{row['ms_per_layer'] * 1e3:>12.1f}"
              f"{row['copy_fraction']:>9.2f}{'' if ratio is None else f'{ratio:.2f}':>9}  {met}")
    for row in peers.get("rows", []):
        what = f"{row['ms_per_layer'] * 1e3:.1f} us a layer" if "ms_per_layer" in row else f"unavailable: {row['unavailable']}"
        print(f"bf16, {row['way']:11} {row['tokens']:>7} tokens {row['agents']:>3} agents: {what}")
    with open(out_path, "w") as file:
        json.dump({**bench, "peers": peers}, file, indent=1)


if __name__ == "__main__":
    main()
