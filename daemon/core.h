// What the parts of the daemon share. Plain references; everything is for the loop's thread.
#pragma once

#include <cstdint>

#include "daemon/backing.h"
#include "daemon/documents.h"
#include "daemon/limits.h"
#include "daemon/memory_probe.h"
#include "daemon/segments.h"
#include "daemon/server.h"
#include "daemon/thread_pool.h"

namespace polykv::daemon {

/// What GetStatus tells beyond what can be counted where it lives.
struct Counters {
  uint64_t tokens_prefilled_total = 0;  // by workers; ingest counts them
  uint64_t tokens_committed_total = 0;
  uint64_t evicted_documents_total = 0;
  uint64_t fingerprint_cache_hits_total = 0;
  uint64_t fingerprint_cache_misses_total = 0;
};

struct Core {
  EventLoop& loop;
  ThreadPool& pool;
  const Limits& limits;
  const MemoryProbe& memory;
  Backing& backing;
  Server& server;
  Segments& segments;
  Catalog& catalog;
  Counters& counters;
  uint64_t epoch = 0;
};

}  // namespace polykv::daemon
