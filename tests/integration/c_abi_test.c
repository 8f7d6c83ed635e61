/* The whole C ABI against a real polykvd, compiled as C11. c_abi_main.cpp starts the daemon. */
#include "tests/integration/c_abi_test.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "polykv/polykv.h"

int failures = 0;

static polykv_layer_geometry layers[LAYERS] = {{KV_HEADS, K_DIM, V_DIM, 0},
                                               {KV_HEADS, K_DIM, V_DIM, 128}};
uint32_t tokens[TOKENS];

static float value_at(int is_v, uint32_t layer, uint64_t token, uint32_t head, uint32_t dim) {
  /* A hash, so that the values look random to a codec; in -1 .. 1. */
  uint32_t x = (uint32_t)token * 2654435761U ^ (layer * 8U + head) * 40503U ^ dim * 2246822519U;
  x = (x ^ (is_v ? 0x9e3779b9U : 0) ^ x >> 15) * 2654435761U;
  x = (x ^ x >> 13) * 3266489917U;
  return (float)(x >> 8) / 8388608.0F - 1.0F;
}

polykv_model the_model(void) {
  polykv_model model;
  polykv_model_init(&model);
  model.name = "test model";
  model.fingerprint[0] = 9;
  model.rope_kind = POLYKV_ROPE_HALF_ROTATION;
  model.rotary_dim = K_DIM;
  model.rope_theta = 10000;
  model.layer_count = LAYERS;
  model.layers = layers;
  return model;
}

polykv_acquire_options producing(const polykv_model* model, polykv_profile profile) {
  polykv_acquire_options options;
  polykv_acquire_options_init(&options);
  options.model = model;
  options.tokens = tokens;
  options.token_count = TOKENS;
  options.profile = profile;
  options.flags = POLYKV_ACQUIRE_MAY_PRODUCE;
  return options;
}

static void texts_and_versions(void) {
  CHECK(polykv_version() == POLYKV_VERSION);
  CHECK(strcmp(polykv_version_text(), POLYKV_VERSION_TEXT) == 0);
  CHECK(strcmp(polykv_status_name(POLYKV_ERR_BUSY), "POLYKV_ERR_BUSY") == 0);
  CHECK(strcmp(polykv_status_text(POLYKV_OK), "success") == 0);
  CHECK(strcmp(polykv_profile_name(POLYKV_PROFILE_PAPER_K8V3), "paper-k8v3") == 0);
  CHECK(strcmp(polykv_profile_name((polykv_profile)99), "unknown") == 0);
  polykv_profile profile = POLYKV_PROFILE_ANY;
  CHECK(polykv_profile_from_name("k8v8", &profile) == POLYKV_OK);
  CHECK(profile == POLYKV_PROFILE_K8V8);
  CHECK_FAILS(POLYKV_ERR_INVALID_ARGUMENT, polykv_profile_from_name("zip", &profile));
  CHECK(strstr(polykv_last_error(), "zip") != NULL);
  CHECK(profile == POLYKV_PROFILE_K8V8);
}

static polykv_session* connect_to(const char* socket_path) {
  polykv_connect_options options;
  polykv_connect_options_init(&options);
  CHECK(options.timeout_ms == 10000);
  options.socket_path = "/nowhere/at/all.sock";
  polykv_session* session = NULL;
  CHECK_FAILS(POLYKV_ERR_DAEMON_UNREACHABLE, polykv_session_connect(&options, &session));
  CHECK(session == NULL);
  CHECK_FAILS(POLYKV_ERR_INVALID_ARGUMENT, polykv_session_connect(&options, NULL));
  options.struct_size = 3;
  CHECK_FAILS(POLYKV_ERR_INVALID_ARGUMENT, polykv_session_connect(&options, &session));
  polykv_connect_options_init(&options);
  options.socket_path = socket_path;
  options.client_name = "c_abi_test";
  CHECK(polykv_session_connect(&options, &session) == POLYKV_OK);
  return session;
}

/* K as Hugging Face has it, [kv_head, token, dim]; V transposed, [kv_head, dim, token]. */
static void publish_segment(polykv_publisher* publisher, uint64_t first, uint64_t count) {
  polykv_segment* segment = NULL;
  CHECK(polykv_segment_begin(publisher, count, &segment) == POLYKV_OK);
  polykv_segment* second = NULL;
  CHECK_FAILS(POLYKV_ERR_INVALID_ARGUMENT, polykv_segment_begin(publisher, 1, &second));
  float* k = malloc(sizeof(float) * KV_HEADS * K_DIM * count);
  float* v = malloc(sizeof(float) * KV_HEADS * V_DIM * count);
  polykv_kv_source source;
  polykv_kv_source_init(&source);
  source.k = k;
  source.v = v;
  source.k_strides = (polykv_strides){(int64_t)count * K_DIM, K_DIM, 1};
  source.v_strides = (polykv_strides){(int64_t)count * V_DIM, 1, (int64_t)count};
  for (uint32_t layer = 0; layer < LAYERS; ++layer) {
    for (uint32_t head = 0; head < KV_HEADS; ++head) {
      for (uint64_t token = 0; token < count; ++token) {
        for (uint32_t dim = 0; dim < K_DIM; ++dim) {
          k[(head * count + token) * K_DIM + dim] = value_at(0, layer, first + token, head, dim);
        }
        for (uint32_t dim = 0; dim < V_DIM; ++dim) {
          v[(head * V_DIM + dim) * count + token] = value_at(1, layer, first + token, head, dim);
        }
      }
    }
    /* A NaN is refused with its place, and the layer can be encoded again. */
    const float kept = k[(1 * count + 5) * K_DIM + 3];
    k[(1 * count + 5) * K_DIM + 3] = NAN;
    CHECK_FAILS(POLYKV_ERR_INVALID_ARGUMENT, polykv_segment_encode_layer(segment, layer, &source));
    CHECK(strstr(polykv_last_error(), "K") != NULL);
    CHECK(strstr(polykv_last_error(), "token 5") != NULL);
    CHECK(strstr(polykv_last_error(), "kv_head 1") != NULL);
    k[(1 * count + 5) * K_DIM + 3] = kept;
    CHECK(polykv_segment_encode_layer(segment, layer, &source) == POLYKV_OK);
    CHECK_FAILS(POLYKV_ERR_INVALID_ARGUMENT, polykv_segment_encode_layer(segment, layer, &source));
  }
  CHECK_FAILS(POLYKV_ERR_INVALID_ARGUMENT, polykv_segment_encode_layer(segment, LAYERS, &source));
  source.v = NULL;
  CHECK_FAILS(POLYKV_ERR_INVALID_ARGUMENT, polykv_segment_encode_layer(segment, 0, &source));
  CHECK(polykv_segment_commit(segment) == POLYKV_OK);
  free(k);
  free(v);
}

static polykv_lease* publish(polykv_session* session, const char* name, polykv_profile profile) {
  const polykv_model model = the_model();
  polykv_acquire_options options = producing(&model, profile);
  options.publish_name = name;
  polykv_lease* lease = NULL;
  polykv_publisher* publisher = NULL;
  CHECK_FAILS(POLYKV_ERR_INVALID_ARGUMENT,
              polykv_document_acquire(session, &options, &lease, NULL));
  CHECK(polykv_document_acquire(session, &options, &lease, &publisher) == POLYKV_OK);
  CHECK(lease == NULL && publisher != NULL);
  if (publisher == NULL) return NULL;

  /* Without WAIT, whoever asks in the meantime learns that somebody is at it. */
  polykv_publisher* other = NULL;
  CHECK_FAILS(POLYKV_ERR_BUSY, polykv_document_acquire(session, &options, &lease, &other));
  polykv_acquire_options waiting = options;
  waiting.flags |= POLYKV_ACQUIRE_WAIT;
  waiting.timeout_ms = 1;
  CHECK_FAILS(POLYKV_ERR_TIMEOUT, polykv_document_acquire(session, &waiting, &lease, &other));

  uint64_t next = 99;
  uint64_t total = 0;
  CHECK(polykv_publisher_position(publisher, &next, &total) == POLYKV_OK);
  CHECK(next == 0 && total == TOKENS);
  polykv_segment* segment = NULL;
  CHECK_FAILS(POLYKV_ERR_INVALID_ARGUMENT, polykv_segment_begin(publisher, TOKENS + 1, &segment));
  if (profile == POLYKV_PROFILE_PAPER_K8V3) {
    CHECK_FAILS(POLYKV_ERR_INVALID_ARGUMENT, polykv_segment_begin(publisher, SEGMENT, &segment));
    publish_segment(publisher, 0, TOKENS);
  } else {
    /* An aborted reservation and an incomplete one leave the publisher as it was. */
    CHECK(polykv_segment_begin(publisher, SEGMENT, &segment) == POLYKV_OK);
    polykv_segment_abort(segment);
    CHECK(polykv_segment_begin(publisher, SEGMENT, &segment) == POLYKV_OK);
    CHECK_FAILS(POLYKV_ERR_INVALID_ARGUMENT, polykv_segment_commit(segment));
    for (uint64_t first = 0; first < TOKENS; first += SEGMENT) {
      CHECK(polykv_publisher_progress(publisher, first) == POLYKV_OK);
      publish_segment(publisher, first, TOKENS - first < SEGMENT ? TOKENS - first : SEGMENT);
    }
  }
  CHECK(polykv_publisher_position(publisher, &next, NULL) == POLYKV_OK);
  CHECK(next == TOKENS);
  CHECK_FAILS(POLYKV_ERR_INVALID_ARGUMENT, polykv_segment_begin(publisher, 0, &segment));
  CHECK(polykv_publisher_finish(publisher, &lease) == POLYKV_OK);
  CHECK(lease != NULL);
  return lease;
}

static void check_info(const polykv_lease* lease, const char* name, polykv_profile profile) {
  polykv_document_info info;
  polykv_document_info_init(&info);
  CHECK(polykv_lease_info(lease, &info) == POLYKV_OK);
  CHECK(info.name_count == 1 && strcmp(info.names[0], name) == 0);
  CHECK(info.token_count == TOKENS && info.profile == profile);
  CHECK(info.segment_count == (profile == POLYKV_PROFILE_PAPER_K8V3 ? 1 : 3));
  CHECK(info.bf16_bytes == (uint64_t)LAYERS * TOKENS * KV_HEADS * (K_DIM + V_DIM) * 2);
  CHECK(info.stored_bytes > 0 && info.lease_count >= 1 && info.is_public == 0);
  CHECK(strcmp(info.state, "sealed") == 0);
  CHECK(info.model->layer_count == LAYERS && info.model->fingerprint[0] == 9);
  CHECK(info.model->layers[1].sliding_window == 128 && info.model->layers[1].v_head_dim == V_DIM);
  CHECK(info.model->rope_theta == 10000 && info.model->source_dtype == POLYKV_F32);
  info.struct_size = 1;
  CHECK_FAILS(POLYKV_ERR_INVALID_ARGUMENT, polykv_lease_info(lease, &info));

  uint32_t read[TOKENS];
  CHECK(polykv_lease_tokens(lease, 0, TOKENS, read) == POLYKV_OK);
  CHECK(memcmp(read, tokens, sizeof read) == 0);
  CHECK(polykv_lease_tokens(lease, SEGMENT - 1, 2, read) == POLYKV_OK);
  CHECK(read[0] == tokens[SEGMENT - 1] && read[1] == tokens[SEGMENT]);
  CHECK(polykv_lease_tokens(lease, TOKENS, 0, NULL) == POLYKV_OK);
  CHECK_FAILS(POLYKV_ERR_INVALID_ARGUMENT, polykv_lease_tokens(lease, 1, TOKENS, read));
  CHECK_FAILS(POLYKV_ERR_INVALID_ARGUMENT, polykv_lease_tokens(lease, UINT64_MAX, 2, read));
}

static void check_views(const polykv_lease* lease, uint32_t segment_count) {
  polykv_layer_view view;
  uint64_t next = 0;
  for (uint32_t segment = 0; segment < segment_count; ++segment) {
    polykv_layer_view_init(&view);
    CHECK(polykv_lease_layer_view(lease, segment, 1, &view) == POLYKV_OK);
    CHECK(view.first_token == next && view.geometry.v_head_dim == V_DIM);
    CHECK(view.payload != NULL && (uintptr_t)view.payload % 64 == 0 && view.payload_bytes > 0);
    next += view.token_count;
  }
  CHECK(next == TOKENS);
  CHECK_FAILS(POLYKV_ERR_INVALID_ARGUMENT, polykv_lease_layer_view(lease, segment_count, 0, &view));
  CHECK_FAILS(POLYKV_ERR_INVALID_ARGUMENT, polykv_lease_layer_view(lease, 0, LAYERS, &view));
}

/* A range across segments, K dense and V transposed with a gap behind each row. */
static void check_decode(const polykv_lease* lease, uint64_t first, uint64_t count,
                         double k_tolerance, double v_tolerance) {
  const int64_t v_row = (int64_t)count + 7;
  const float untouched = 12345.0F;
  float* k = malloc(sizeof(float) * KV_HEADS * K_DIM * count);
  float* v = malloc(sizeof(float) * KV_HEADS * V_DIM * (size_t)v_row);
  for (size_t i = 0; i < (size_t)KV_HEADS * V_DIM * (size_t)v_row; ++i) v[i] = untouched;
  polykv_decode_options options;
  polykv_decode_options_init(&options);
  options.first_token = first;
  options.token_count = count;
  options.k = k;
  options.v = v;
  options.v_strides = (polykv_strides){V_DIM * v_row, 1, v_row};
  for (uint32_t layer = 0; layer < LAYERS; ++layer) {
    CHECK(polykv_layer_decode(lease, layer, &options) == POLYKV_OK);
    double k_worst = 0;
    double v_error = 0;
    double v_norm = 0;
    for (uint64_t token = 0; token < count; ++token) {
      for (uint32_t head = 0; head < KV_HEADS; ++head) {
        for (uint32_t dim = 0; dim < K_DIM; ++dim) {
          const float want = value_at(0, layer, first + token, head, dim);
          k_worst = fmax(k_worst, fabs(k[(token * KV_HEADS + head) * K_DIM + dim] - want));
        }
        for (uint32_t dim = 0; dim < V_DIM; ++dim) {
          const float want = value_at(1, layer, first + token, head, dim);
          const double error = v[((int64_t)(head * V_DIM + dim)) * v_row + (int64_t)token] - want;
          v_error += error * error;
          v_norm += want * want;
        }
      }
    }
    CHECK(k_worst <= k_tolerance);
    CHECK(count == 0 || sqrt(v_error / v_norm) <= v_tolerance);
  }
  for (uint32_t row = 0; row < KV_HEADS * V_DIM; ++row) {
    for (int64_t gap = (int64_t)count; gap < v_row; ++gap) CHECK(v[row * v_row + gap] == untouched);
  }
  free(k);
  free(v);
}

static void check_wrong_decodes(const polykv_lease* lease) {
  polykv_decode_options options;
  polykv_decode_options_init(&options);
  float nothing[1];
  options.k = nothing;
  CHECK(polykv_layer_decode(lease, 0, &options) == POLYKV_OK); /* no tokens */
  options.token_count = TOKENS + 1;
  CHECK_FAILS(POLYKV_ERR_INVALID_ARGUMENT, polykv_layer_decode(lease, 0, &options));
  options.first_token = UINT64_MAX;
  options.token_count = 2;
  CHECK_FAILS(POLYKV_ERR_INVALID_ARGUMENT, polykv_layer_decode(lease, 0, &options));
  options.first_token = 0;
  options.token_count = 0;
  CHECK_FAILS(POLYKV_ERR_INVALID_ARGUMENT, polykv_layer_decode(lease, LAYERS, &options));
  options.dtype = (polykv_dtype)9;
  CHECK_FAILS(POLYKV_ERR_INVALID_ARGUMENT, polykv_layer_decode(lease, 0, &options));
  CHECK_FAILS(POLYKV_ERR_INVALID_ARGUMENT, polykv_layer_decode(lease, 0, NULL));
  CHECK_FAILS(POLYKV_ERR_INVALID_ARGUMENT, polykv_layer_decode(NULL, 0, &options));
}

static int count_documents(void* user, const polykv_document_info* info) {
  CHECK(info->struct_size == sizeof *info && info->token_count == TOKENS);
  return ++*(int*)user == 2; /* a non-zero answer ends the listing */
}

static void read_and_remove(polykv_session* session, polykv_lease* exact, polykv_lease* paper) {
  check_info(exact, "exact one", POLYKV_PROFILE_EXACT);
  check_views(exact, 3);
  check_decode(exact, 0, TOKENS, 0, 0);
  check_decode(exact, SEGMENT - 10, SEGMENT + 20, 0, 0);
  check_decode(exact, TOKENS - 1, 1, 0, 0);
  check_decode(exact, 5, 0, 0, 0);
  check_wrong_decodes(exact);
  CHECK(polykv_lease_verify(exact) == POLYKV_OK);
  check_info(paper, "paper one", POLYKV_PROFILE_PAPER_K8V3);
  check_views(paper, 1);
  check_decode(paper, SEGMENT - 10, SEGMENT + 20, 0.005, 0.25);

  int count = 0;
  CHECK(polykv_document_list(session, count_documents, &count) == POLYKV_OK);
  CHECK(count == 2);

  /* The same digest in two profiles: by name, by digest and profile, by model and tokens. */
  polykv_document_info info;
  polykv_document_info_init(&info);
  CHECK(polykv_lease_info(exact, &info) == POLYKV_OK);
  polykv_acquire_options options;
  polykv_acquire_options_init(&options);
  polykv_lease* lease = NULL;
  options.digest = info.digest;
  options.profile = POLYKV_PROFILE_PAPER_K8V3;
  CHECK(polykv_document_acquire(session, &options, &lease, NULL) == POLYKV_OK);
  check_info(lease, "paper one", POLYKV_PROFILE_PAPER_K8V3);
  CHECK(polykv_lease_release(lease) == POLYKV_OK);
  const polykv_model model = the_model();
  options = producing(&model, POLYKV_PROFILE_EXACT);
  polykv_publisher* publisher = NULL;
  CHECK(polykv_document_acquire(session, &options, &lease, &publisher) == POLYKV_OK);
  CHECK(publisher == NULL);
  check_info(lease, "exact one", POLYKV_PROFILE_EXACT);
  CHECK(polykv_lease_release(lease) == POLYKV_OK);

  CHECK(polykv_document_remove(session, "paper one", NULL) == POLYKV_OK);
  CHECK_FAILS(POLYKV_ERR_NOT_FOUND, polykv_document_remove(session, "paper one", NULL));
  check_decode(paper, 0, TOKENS, 0.005, 0.25); /* a removed document stays readable */
  CHECK(polykv_document_remove(session, NULL, info.digest) == POLYKV_OK);
  options.flags = 0;
  CHECK_FAILS(POLYKV_ERR_NOT_FOUND, polykv_document_acquire(session, &options, &lease, NULL));
  CHECK(polykv_lease_release(paper) == POLYKV_OK);

  polykv_daemon_status status;
  polykv_daemon_status_init(&status);
  CHECK(polykv_session_daemon_status(session, &status) == POLYKV_OK);
  CHECK(status.tokens_committed_total == 2 * TOKENS && status.lease_count == 1);
}

static void unfinished_publishing(polykv_session* session) {
  const polykv_model model = the_model();
  polykv_acquire_options options = producing(&model, POLYKV_PROFILE_K8V8);
  options.publish_name = "never";
  polykv_lease* lease = NULL;
  polykv_publisher* publisher = NULL;
  CHECK(polykv_document_acquire(session, &options, &lease, &publisher) == POLYKV_OK);
  publish_segment(publisher, 0, SEGMENT);
  CHECK_FAILS(POLYKV_ERR_INVALID_ARGUMENT, polykv_publisher_finish(publisher, &lease));
  CHECK(polykv_document_acquire(session, &options, &lease, &publisher) == POLYKV_OK);
  polykv_segment* segment = NULL;
  CHECK(polykv_segment_begin(publisher, 0, &segment) == POLYKV_OK);
  polykv_publisher_abort(publisher);
  CHECK_FAILS(POLYKV_ERR_STALE, polykv_segment_commit(segment));
  polykv_acquire_options named;
  polykv_acquire_options_init(&named);
  named.name = "never";
  CHECK_FAILS(POLYKV_ERR_NOT_FOUND, polykv_document_acquire(session, &named, &lease, NULL));
  CHECK(lease == NULL);
}

/* One producer, a reader who streams, and a second producer who goes on behind a shared prefix. */
static void growing_documents(polykv_session* session) {
  polykv_model model = the_model();
  model.fingerprint[0] = 10; /* nothing of it is there yet */
  polykv_acquire_options options = producing(&model, POLYKV_PROFILE_EXACT);
  polykv_lease* lease = NULL;
  polykv_publisher* publisher = NULL;
  polykv_lease* sealed = NULL;
  CHECK(polykv_document_acquire(session, &options, &lease, &publisher) == POLYKV_OK);
  CHECK(publisher != NULL && lease == NULL);
  CHECK_FAILS(POLYKV_ERR_NOT_FOUND, polykv_publisher_acquire_sealed(publisher, &sealed));
  options.flags = POLYKV_ACQUIRE_STREAM;
  CHECK(polykv_document_acquire(session, &options, &lease, NULL) == POLYKV_OK);
  polykv_document_info info;
  polykv_document_info_init(&info);
  CHECK(polykv_lease_info(lease, &info) == POLYKV_OK);
  CHECK(strcmp(info.state, "filling") == 0 && info.sealed_token_count == 0);
  CHECK(info.token_count == TOKENS);
  CHECK_FAILS(POLYKV_ERR_TIMEOUT, polykv_lease_wait(lease, 1, 0));
  CHECK_FAILS(POLYKV_ERR_INVALID_ARGUMENT, polykv_lease_wait(lease, TOKENS + 1, 0));
  publish_segment(publisher, 0, SEGMENT);
  CHECK(polykv_lease_wait(lease, SEGMENT, -1) == POLYKV_OK);
  check_decode(lease, 0, SEGMENT, 0, 0);
  uint32_t id = 0;
  CHECK_FAILS(POLYKV_ERR_BUSY, polykv_lease_tokens(lease, SEGMENT, 1, &id));
  CHECK(polykv_publisher_acquire_sealed(publisher, &sealed) == POLYKV_OK);
  check_decode(sealed, 0, SEGMENT, 0, 0);
  CHECK(polykv_lease_release(sealed) == POLYKV_OK);
  publish_segment(publisher, SEGMENT, TOKENS - SEGMENT);
  CHECK(polykv_lease_wait(lease, TOKENS, -1) == POLYKV_OK);
  CHECK(polykv_publisher_finish(publisher, NULL) == POLYKV_OK);
  CHECK(polykv_lease_info(lease, &info) == POLYKV_OK);
  CHECK(strcmp(info.state, "sealed") == 0 && info.segment_count == 2);
  CHECK(info.prefix_treatment == 1); /* the second segment came after the first was leased */
  check_decode(lease, 0, TOKENS, 0, 0);

  static uint32_t longer[TOKENS + 50];
  memcpy(longer, tokens, sizeof tokens);
  for (uint32_t i = 0; i < 50; ++i) longer[TOKENS + i] = i;
  options = producing(&model, POLYKV_PROFILE_EXACT);
  options.tokens = longer;
  options.token_count = TOKENS + 50;
  uint64_t next = 0;
  polykv_lease* none = NULL;
  CHECK(polykv_document_acquire(session, &options, &none, &publisher) == POLYKV_OK);
  CHECK(polykv_publisher_position(publisher, &next, NULL) == POLYKV_OK);
  CHECK(next == TOKENS / 256 * 256);
  polykv_publisher_abort(publisher);
  options.extends = info.digest;
  CHECK(polykv_document_acquire(session, &options, &none, &publisher) == POLYKV_OK);
  CHECK(polykv_publisher_position(publisher, &next, NULL) == POLYKV_OK);
  CHECK(next == TOKENS);
  publish_segment(publisher, TOKENS, 50);
  polykv_lease* whole = NULL;
  CHECK(polykv_publisher_finish(publisher, &whole) == POLYKV_OK);
  check_decode(whole, 0, TOKENS + 50, 0, 0);
  polykv_document_info_init(&info);
  CHECK(polykv_lease_info(whole, &info) == POLYKV_OK);
  CHECK(info.segment_count == 3 && info.shared_bytes > 0 && info.shared_bytes < info.stored_bytes);
  CHECK(polykv_lease_release(whole) == POLYKV_OK);
  CHECK(polykv_lease_release(lease) == POLYKV_OK);
}

int c_abi_test(const char* socket_path, int on_gpu) {
  for (uint32_t i = 0; i < TOKENS; ++i) tokens[i] = i * 13 + 1;
  texts_and_versions();
  polykv_session* session = connect_to(socket_path);
  if (session == NULL) return failures + 1;
  structs_of_later_versions(session);
  wrong_requests(session);
  polykv_lease* exact = publish(session, "exact one", POLYKV_PROFILE_EXACT);
  polykv_lease* paper = publish(session, "paper one", POLYKV_PROFILE_PAPER_K8V3);
  if (exact == NULL || paper == NULL) return failures + 1;
  read_and_remove(session, exact, paper);
  unfinished_publishing(session);
  growing_documents(session);

  /* NULL is allowed where the header says so. */
  polykv_session_close(NULL);
  polykv_segment_abort(NULL);
  polykv_publisher_abort(NULL);
  CHECK(polykv_lease_release(NULL) == POLYKV_OK);
  /* A lease outlives its session. Device memory is not read any more, whose owner only the session
   * tells of, but what was decoded before is in host memory. */
  polykv_session_close(session);
  check_decode(exact, 0, TOKENS, 0, 0);
  if (on_gpu) {
    CHECK_FAILS(POLYKV_ERR_DAEMON_GONE, polykv_lease_verify(exact));
  } else {
    CHECK(polykv_lease_verify(exact) == POLYKV_OK);
  }
  CHECK(polykv_lease_release(exact) == POLYKV_OK);
  return failures;
}
