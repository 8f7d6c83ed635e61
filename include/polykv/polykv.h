/*
 * polykv: one compressed KV cache of a document, shared by many agent processes. The C ABI of
 * libpolykv.
 *
 * An agent connects to polykvd (a session), acquires a document (a lease) and decodes layers of it
 * into its own cache. A producer that already holds K and V publishes them; polykvd can also
 * compute them itself (ingest).
 *
 * Rules that hold for every function unless it says otherwise:
 *   - It returns POLYKV_OK or a code of polykv/status.h; polykv_last_error() then tells the failing
 *     call's operation, object, cause and remedy in one line. Out parameters are untouched on
 *     failure.
 *   - Structs with a struct_size are set up by their _init function, whether the caller fills them
 *     or the library does: it tells the library which version of the struct the caller knows. In
 *     options, fields added later default to 0.
 *   - Strings are UTF-8 and end with NUL; the library copies what it keeps. Sizes are bytes, counts
 *     are counts.
 *   - Handles may be used from several threads at once, except that closing, releasing or finishing
 *     a handle must not race with another use of the same handle, and that a publisher belongs to
 *     one thread (its segment's layers may be encoded by many).
 *   - After fork() every handle of the parent answers POLYKV_ERR_FORKED in the child; only close,
 *     release and abort may be called there, and they free memory and descriptors of the child
 *     alone. A child connects anew. An open segment's memory stays with the parent, which can
 *     commit it while the child lives. (That is of fork(), not of a raw clone.)
 *   - When polykvd is gone, calls that need it return POLYKV_ERR_DAEMON_GONE, none hangs; what a
 *     lease has mapped stays readable until it is released.
 *   - Tokens, layers and segments are counted from 0.
 *
 * C11 and C++20; no exception leaves the library.
 */
#ifndef POLYKV_POLYKV_H
#define POLYKV_POLYKV_H

#include <stddef.h>
#include <stdint.h>

#include "polykv/status.h"
#include "polykv/version.h"

#if defined(__GNUC__)
#define POLYKV_API __attribute__((visibility("default")))
#define POLYKV_NODISCARD __attribute__((warn_unused_result))
#else
#define POLYKV_API
#define POLYKV_NODISCARD
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- versions and errors ---- */

/** The library's version, as POLYKV_VERSION is the headers'. Same major: compatible. */
POLYKV_API uint32_t polykv_version(void);
POLYKV_API const char* polykv_version_text(void);
/** What a code means ("the deadline passed"), and its name ("POLYKV_ERR_TIMEOUT"). Static. */
POLYKV_API const char* polykv_status_text(polykv_status status);
POLYKV_API const char* polykv_status_name(polykv_status status);
/** Message of this thread's last failed call; "" if none did. Valid until its next failure. */
POLYKV_API const char* polykv_last_error(void);

/* ---- plain data ---- */

typedef enum polykv_dtype { POLYKV_F32 = 1, POLYKV_F16 = 2, POLYKV_BF16 = 3 } polykv_dtype;

typedef enum polykv_profile {
  POLYKV_PROFILE_ANY = 0, /* in an acquire: whichever is there */
  POLYKV_PROFILE_EXACT = 1,
  POLYKV_PROFILE_PAPER_K8V3 = 2,
  POLYKV_PROFILE_K8V8 = 3,
  POLYKV_PROFILE_K6V5 = 4,
  POLYKV_PROFILE_K5V4 = 5,
  POLYKV_PROFILE_K8V3 = 6,
  POLYKV_PROFILE_K4V3 = 7,
  POLYKV_PROFILE_AUTO = 8 /* of documents: each layer has one of those above */
} polykv_profile;

/** "k8v8" and back. An unknown number is "unknown", an unknown name POLYKV_ERR_INVALID_ARGUMENT. */
POLYKV_API const char* polykv_profile_name(polykv_profile profile);
POLYKV_API POLYKV_NODISCARD polykv_status polykv_profile_from_name(const char* name,
                                                                   polykv_profile* out);

/**
 * One layer of a KV cache; tensors are [layer, token, kv_head, head_dim], K after RoPE. Used in
 * arrays, so it never grows.
 */
typedef struct polykv_layer_geometry {
  uint32_t kv_head_count;
  uint32_t k_head_dim;
  uint32_t v_head_dim;
  uint32_t sliding_window; /* tokens; 0: none */
} polykv_layer_geometry;

typedef enum polykv_rope_kind {
  POLYKV_ROPE_NONE = 0,
  POLYKV_ROPE_HALF_ROTATION = 1,
  POLYKV_ROPE_INTERLEAVED = 2
} polykv_rope_kind;

typedef enum polykv_rope_scaling {
  POLYKV_ROPE_SCALING_NONE = 0,
  POLYKV_ROPE_SCALING_LINEAR = 1,
  POLYKV_ROPE_SCALING_YARN = 2,
  POLYKV_ROPE_SCALING_LLAMA3 = 3
} polykv_rope_scaling;

/**
 * Which model made a KV cache. Documents are found by it: everything but `name` must be equal for
 * two caches to be the same. `fingerprint` is any 32 bytes that identify the weights;
 * polykv-prefill uses BLAKE2b-256 over configuration and tensors, which polykv_document_info tells.
 */
typedef struct polykv_model {
  size_t struct_size;
  const char* name; /* for people; may be NULL */
  uint8_t fingerprint[32];
  polykv_dtype source_dtype; /* in which K and V were computed */
  polykv_rope_kind rope_kind;
  polykv_rope_scaling rope_scaling;
  uint32_t rotary_dim;
  uint32_t original_context; /* tokens; 0 without scaling */
  double rope_theta;
  double rope_scaling_factor;
  uint32_t layer_count;
  const polykv_layer_geometry* layers; /* [layer_count] */
} polykv_model;
POLYKV_API void polykv_model_init(polykv_model* model);

/* ---- sessions ---- */

typedef struct polykv_session polykv_session;

typedef struct polykv_connect_options {
  size_t struct_size;
  /** NULL: that of the environment's POLYKV_SOCKET, else the first that accepts of
      $XDG_RUNTIME_DIR/polykv/polykv.sock and /run/polykv/polykv.sock. */
  const char* socket_path;
  const char* client_name; /* shown by `polykvctl status`; NULL: the program's name */
  int64_t timeout_ms;      /* for connecting and the handshake; default 10000 */
} polykv_connect_options;
POLYKV_API void polykv_connect_options_init(polykv_connect_options* options);

/**
 * Connects and shakes hands. options may be NULL. Errors: DAEMON_UNREACHABLE, VERSION, PERMISSION,
 * LIMIT, TIMEOUT.
 */
POLYKV_API POLYKV_NODISCARD polykv_status
polykv_session_connect(const polykv_connect_options* options, polykv_session** out);
/**
 * Ends the session. polykvd forgets its leases and tickets. Leases made by it stay readable (their
 * mappings are the process's) until each is released; publishers of it answer
 * POLYKV_ERR_DAEMON_GONE. NULL is allowed.
 */
POLYKV_API void polykv_session_close(polykv_session* session);

/* ---- acquire: read a document, or become its producer ---- */

typedef struct polykv_lease polykv_lease;
typedef struct polykv_publisher polykv_publisher;

enum {
  /** The caller can compute K and V itself: on a miss it becomes the producer (*out_publisher is
     set). */
  POLYKV_ACQUIRE_MAY_PRODUCE = 1,
  /** Somebody else is producing it: wait until it is sealed or timeout_ms passed, instead of
     POLYKV_ERR_BUSY. */
  POLYKV_ACQUIRE_WAIT = 2,
  /** The given `publish_name` may be taken from another document of the caller. */
  POLYKV_ACQUIRE_REPLACE_NAME = 4,
  /** Somebody else is producing it: lease it now and read its segments as they are sealed, see
     polykv_lease_wait. Not for profiles whose documents are one segment (POLYKV_ERR_UNSUPPORTED). */
  POLYKV_ACQUIRE_STREAM = 8
};

/** Which document, in exactly one way: `name`, `digest`, or a model (in one of three ways) and
    `tokens`. */
typedef struct polykv_acquire_options {
  size_t struct_size;
  const char* name;
  const uint8_t* digest;     /* [32], of polykv_document_info */
  const polykv_model* model; /* or: */
  const char* model_name;    /* of polykvd's configuration, or: */
  int model_fd; /* -1: none. An open model file; polykvd reads it, never a path. Not closed. */
  const uint32_t* tokens; /* [token_count] */
  size_t token_count;
  polykv_profile profile;   /* ANY finds whichever is there; a producer must name one */
  uint32_t flags;           /* POLYKV_ACQUIRE_* */
  int64_t timeout_ms;       /* for POLYKV_ACQUIRE_WAIT; -1: without limit; default 600000 */
  const char* publish_name; /* the name the document gets if the caller produces it; may be NULL */
  /** [32] or NULL: the digest of a document that the tokens begin with. All of it is used, where
     otherwise prefixes are shared in steps of 256 tokens. For producers. */
  const uint8_t* extends;
} polykv_acquire_options;
POLYKV_API void polykv_acquire_options_init(polykv_acquire_options* options);

/**
 * Finds a document in the caller's domain (user id), then among the public ones. Success sets
 * exactly one of *out_lease (sealed, mapped, ready to read; with STREAM perhaps not all of it yet)
 * and *out_publisher (the caller is the producer; only with MAY_PRODUCE). out_publisher may be NULL
 * without MAY_PRODUCE. Tokens that other documents of the same model and profile begin with are not
 * produced again: see polykv_publisher_position and polykv_publisher_acquire_sealed. With WAIT a
 * producer also waits for a longer prefix that somebody is about to seal. Errors: NOT_FOUND, BUSY, TIMEOUT, PRODUCER_LOST, BUDGET, LIMIT, ALREADY_EXISTS (publish_name),
 * UNSUPPORTED (profile), MODEL_*.
 */
POLYKV_API POLYKV_NODISCARD polykv_status
polykv_document_acquire(polykv_session* session, const polykv_acquire_options* options,
                        polykv_lease** out_lease, polykv_publisher** out_publisher);

/** Facts about a document. Pointers live as long as the lease, or as the callback that got it. */
typedef struct polykv_document_info {
  size_t struct_size;
  const char* const* names; /* [name_count] */
  size_t name_count;
  uint8_t digest[32]; /* the chain's last digest: model and tokens, not profile */
  const polykv_model* model;
  polykv_profile profile;
  uint64_t token_count;
  uint32_t segment_count;
  uint64_t stored_bytes; /* everything: codes, gains, headers, token ids, padding */
  uint64_t bf16_bytes;   /* what K and V alone take as bf16 */
  uint32_t lease_count;  /* when polykvd told: at the acquire, or at the listing */
  /** "sealed"; "filling": being produced; "incomplete": its producer was lost; "retiring". */
  const char* state;
  int64_t created_unix_ms;
  int is_public;
  uint64_t sealed_token_count; /* of a lease: that can be read */
  uint64_t shared_bytes;       /* of stored_bytes: in segments that other documents use as well */
  /** How the tokens before a segment were treated when it was computed: 0 exact, in its producer's
     own cache; 1 decoded from the pool; 2 in the pool, but computed again. The strongest of its
     segments: 1, else 2, else 0. */
  uint32_t prefix_treatment;
  const struct polykv_layer_quality* layers; /* [model->layer_count]; see polykv/certificate.h */
  const char* backing; /* where it is: "memfd" (host memory) or "cuda"; see polykv/cuda.h */
} polykv_document_info;
POLYKV_API void polykv_document_info_init(polykv_document_info* info);
POLYKV_API POLYKV_NODISCARD polykv_status polykv_lease_info(const polykv_lease* lease,
                                                            polykv_document_info* out);

/** Copies token ids [first, first + count) of the document to out. */
POLYKV_API POLYKV_NODISCARD polykv_status polykv_lease_tokens(const polykv_lease* lease,
                                                              uint64_t first, uint64_t count,
                                                              uint32_t* out);

/** One layer in one segment, packed, in place. Not owned; valid until the lease is released. */
typedef struct polykv_layer_view {
  size_t struct_size;
  uint64_t first_token; /* of the document */
  uint64_t token_count;
  polykv_layer_geometry geometry;
  polykv_profile profile; /* of this layer */
  const void* payload;    /* docs/segment-format.md draws it; 64-byte aligned */
  uint64_t payload_bytes;
} polykv_layer_view;
POLYKV_API void polykv_layer_view_init(polykv_layer_view* view);
/** segment: 0 .. segment_count-1, in token order. */
POLYKV_API POLYKV_NODISCARD polykv_status polykv_lease_layer_view(const polykv_lease* lease,
                                                                  uint32_t segment, uint32_t layer,
                                                                  polykv_layer_view* out);

/**
 * Distances between neighbours along a tensor's axes, in elements; any sign and order. All three 0
 * (as after _init) means dense [token, kv_head, head_dim].
 */
typedef struct polykv_strides {
  int64_t kv_head;
  int64_t token;
  int64_t dim;
} polykv_strides;

typedef struct polykv_decode_options {
  size_t struct_size;
  uint64_t first_token; /* of the document */
  uint64_t token_count;
  polykv_dtype dtype;
  void* k; /* element of (kv_head 0, first_token, dim 0); NULL: K is not wanted */
  void* v;
  polykv_strides k_strides;
  polykv_strides v_strides;
} polykv_decode_options;
POLYKV_API void polykv_decode_options_init(polykv_decode_options* options);

/**
 * Waits until the first token_count tokens of the document can be read, at most timeout_ms (-1:
 * without limit; 0: only looks). Of a document that was sealed when it was leased, they can. Errors:
 * TIMEOUT; PRODUCER_LOST: nobody produces the rest at the moment (what is there stays readable, and
 * one may wait again); INVALID_ARGUMENT: the document is shorter; DAEMON_GONE. Other threads may read
 * meanwhile. How many tokens there are is in polykv_lease_info, `sealed_token_count`; reading others
 * is POLYKV_ERR_BUSY.
 */
POLYKV_API POLYKV_NODISCARD polykv_status polykv_lease_wait(polykv_lease* lease,
                                                            uint64_t token_count,
                                                            int64_t timeout_ms);

/**
 * Decodes K and V of one layer for a token range into the caller's memory; spans segments and
 * writes only the addressed elements. Values beyond fp16's range become infinite when dtype is f16.
 * Disjoint targets may be decoded by several threads at once.
 *
 * Memory that nobody wrote before takes several times as long, since the kernel zeroes it a page at a
 * time: where the machine has transparent huge pages, madvise(MADV_HUGEPAGE) over a new cache saves
 * more than half of it.
 */
POLYKV_API POLYKV_NODISCARD polykv_status polykv_layer_decode(const polykv_lease* lease,
                                                              uint32_t layer,
                                                              const polykv_decode_options* options);

/** Recomputes every checksum of the mapped segments. POLYKV_ERR_CORRUPT names segment and layer. */
POLYKV_API POLYKV_NODISCARD polykv_status polykv_lease_verify(const polykv_lease* lease);

/**
 * Unmaps and tells polykvd. Frees the handle whatever it returns, so no other thread may still use
 * it. NULL is allowed. POLYKV_OK also after the session was closed, which ended the lease for
 * polykvd.
 */
POLYKV_API polykv_status polykv_lease_release(polykv_lease* lease);

/* ---- publish: the caller supplies K and V ---- */

/** K and V of one layer for the tokens of one segment, anywhere in the caller's memory. */
typedef struct polykv_kv_source {
  size_t struct_size;
  polykv_dtype dtype;
  const void* k; /* element of (kv_head 0, the segment's first token, dim 0) */
  const void* v;
  polykv_strides k_strides;
  polykv_strides v_strides;
} polykv_kv_source;
POLYKV_API void polykv_kv_source_init(polykv_kv_source* source);

typedef struct polykv_segment polykv_segment;

/**
 * The first token that is not sealed yet, and the token count of the whole document. The first is
 * not 0 when other documents begin with the same tokens, or another producer was lost.
 */
POLYKV_API POLYKV_NODISCARD polykv_status polykv_publisher_position(
    const polykv_publisher* publisher, uint64_t* out_next_token, uint64_t* out_token_count);
/**
 * A lease on what is sealed already, tokens 0 .. next_token: for a producer that decodes it instead
 * of computing it. Segments begun after that record that they were computed behind decoded tokens.
 * POLYKV_ERR_NOT_FOUND when next_token is 0.
 */
POLYKV_API POLYKV_NODISCARD polykv_status
polykv_publisher_acquire_sealed(polykv_publisher* publisher, polykv_lease** out_lease);
/**
 * Reserves memory for the next token_count tokens (0: 4,096, or what is left; all of them for
 * paper-k8v3, which is always one segment). One segment of a publisher is open at a time. Errors:
 * BUDGET names what is needed and what is free; STALE if the ticket was lost (see
 * polykv_publisher_progress).
 */
POLYKV_API POLYKV_NODISCARD polykv_status polykv_segment_begin(polykv_publisher* publisher,
                                                               uint64_t token_count,
                                                               polykv_segment** out);
/**
 * Encodes one layer, once. Different layers may be encoded by several threads at once. NaN and
 * infinities are refused with their place (POLYKV_ERR_INVALID_ARGUMENT); the layer may then be
 * encoded again.
 */
POLYKV_API POLYKV_NODISCARD polykv_status polykv_segment_encode_layer(
    polykv_segment* segment, uint32_t layer, const polykv_kv_source* source);
/**
 * Unmaps, seals, verifies: after it the bytes can never change. Frees the handle whatever it
 * returns. A layer that was not encoded is POLYKV_ERR_INVALID_ARGUMENT, and the reservation is
 * given back.
 */
POLYKV_API POLYKV_NODISCARD polykv_status polykv_segment_commit(polykv_segment* segment);
/** Gives the reservation back. Frees the handle. NULL is allowed. */
POLYKV_API void polykv_segment_abort(polykv_segment* segment);

/**
 * Tells that the producer is alive and how far it is. A ticket without a commit or progress for the
 * daemon's stall deadline (30 s by default) is lost and the next waiter becomes the producer: then
 * this returns POLYKV_ERR_STALE.
 */
POLYKV_API POLYKV_NODISCARD polykv_status polykv_publisher_progress(polykv_publisher* publisher,
                                                                    uint64_t tokens_done);

/**
 * Ends publishing. When every token is committed the document is sealed (it is so from the last
 * commit on), and *out_lease, unless out_lease is NULL, is a lease on it; otherwise
 * POLYKV_ERR_INVALID_ARGUMENT and everything is given up, as in abort. Frees the publisher whatever
 * it returns.
 */
POLYKV_API POLYKV_NODISCARD polykv_status polykv_publisher_finish(polykv_publisher* publisher,
                                                                  polykv_lease** out_lease);
/**
 * Gives the ticket up. Segments that were committed stay for the next producer of the document, until
 * memory is needed or the document is removed. Frees the publisher; a
 * segment still open must be freed by its abort. NULL is allowed.
 */
POLYKV_API void polykv_publisher_abort(polykv_publisher* publisher);

/* ---- ingest: polykvd computes K and V ---- */

typedef enum polykv_ingest_phase {
  POLYKV_INGEST_QUEUED = 0,
  POLYKV_INGEST_LOADING = 1, /* the model */
  POLYKV_INGEST_TOKENIZING = 2,
  POLYKV_INGEST_PREFILLING = 3, /* tokens_done of token_count */
  POLYKV_INGEST_SEALED = 4
} polykv_ingest_phase;

typedef struct polykv_ingest_progress {
  size_t struct_size;
  polykv_ingest_phase phase;
  uint64_t tokens_done;
  uint64_t token_count;  /* 0 while unknown */
  uint64_t memory_bytes; /* what the worker said it needs, before it starts; 0 while unknown */
} polykv_ingest_progress;
/** Called on the thread that called ingest. Non-zero: cancel; ingest returns POLYKV_ERR_CANCELLED
 */
typedef int (*polykv_ingest_callback)(void* user, const polykv_ingest_progress* progress);

enum {
  POLYKV_INGEST_ADD_BOS = 1,       /* put the model's BOS token first */
  POLYKV_INGEST_PARSE_SPECIAL = 2, /* special tokens in the text become tokens: trusted text only */
  POLYKV_INGEST_CHAT_HEAD = 4,     /* put the head of the model's chat template in front */
  POLYKV_INGEST_REPLACE_NAME = 8,  /* the name may be taken from another document of the caller */
  POLYKV_INGEST_SHARE_PUBLIC = 16, /* every user may read it; only with a configured model */
  /** A prefix that is in the pool is computed again, though not stored, so that the rest attends to
     exact K and V; without it the rest attends to what the pool decodes to, as every agent does. */
  POLYKV_INGEST_RECOMPUTE_PREFIX = 32
};

typedef struct polykv_ingest_options {
  size_t struct_size;
  const char* name;       /* the document's name; may be NULL */
  const char* model_name; /* of polykvd's configuration, or: */
  int model_fd;           /* -1: none. A GGUF file open for reading. Not closed. */
  int text_fd; /* -1: none. UTF-8 text; read from offset 0 if it can be sought, else to its end */
  const uint32_t* tokens; /* instead of text_fd: [token_count] ids of the model */
  size_t token_count;
  int before_fd; /* -1: none. Text put in front; its special tokens are parsed: the caller's own */
  polykv_profile profile;             /* default POLYKV_PROFILE_K5V4 */
  uint32_t flags;                     /* POLYKV_INGEST_* */
  polykv_ingest_callback on_progress; /* may be NULL */
  void* user;
  int64_t timeout_ms; /* -1 (default): without limit */
  /** The text continues this document, by its name or its digest ([32]); both may be NULL. Only the
     text is computed and stored. `profile` is the document's, or ANY. A `name` of NULL moves the
     name of a document of the caller's own to the longer one; leases on the shorter one stay. */
  const char* extend_name;
  const uint8_t* extend_digest;
} polykv_ingest_options;
POLYKV_API void polykv_ingest_options_init(polykv_ingest_options* options);

/**
 * Computes the document unless it is there already (single flight: equal requests share one
 * prefill) and leases it. out_lease may be NULL. Errors: MODEL_FORMAT, MODEL_UNSUPPORTED,
 * EMPTY_DOCUMENT, CONTEXT_EXCEEDED, BUDGET, WORKER (polykv-prefill died; the daemon goes on),
 * PRODUCER_LOST, CANCELLED, TIMEOUT, ALREADY_EXISTS (name).
 */
POLYKV_API POLYKV_NODISCARD polykv_status polykv_document_ingest(
    polykv_session* session, const polykv_ingest_options* options, polykv_lease** out_lease);

/* ---- catalog ---- */

/** Called for each document the caller may see, in unspecified order. Non-zero ends the listing. */
typedef int (*polykv_document_callback)(void* user, const polykv_document_info* info);
POLYKV_API POLYKV_NODISCARD polykv_status polykv_document_list(polykv_session* session,
                                                               polykv_document_callback callback,
                                                               void* user);

/**
 * Takes the name away; a document without a name left is retired: no new lease, its memory is freed
 * when the last lease ends. With digest ([32], name NULL): retires it with all its names, all
 * profiles. Errors: NOT_FOUND.
 */
POLYKV_API POLYKV_NODISCARD polykv_status polykv_document_remove(polykv_session* session,
                                                                 const char* name,
                                                                 const uint8_t* digest);

#ifdef __cplusplus
}
#endif

#include "polykv/attend.h"
#include "polykv/daemon_status.h"

#endif
