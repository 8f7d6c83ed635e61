// The subcommands. Each adds its rows to the report and throws what went wrong, a wrong result among
// it.
#pragma once

#include "tests/bench/polykv_bench/options.h"
#include "tests/bench/polykv_bench/report.h"

namespace polykv::bench {

/// Attention to a document in place, a call a layer, as a decode step does it.
void bench_attend(const Options& options, Report& report);
/// Documents into an agent's own cache, a call a layer.
void bench_decode(const Options& options, Report& report);
/// Layers from fp16 into touched memory, checksums included.
void bench_encode(const Options& options, Report& report);
/// From `acquire` of a document that is there to its first layer view.
void bench_attach(const Options& options, Report& report);

}  // namespace polykv::bench
