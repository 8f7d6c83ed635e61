/*
 * hello_pool: publishes synthetic K and V from one process and reads them in another.
 *
 *   hello_pool           publishes, then starts itself anew as the reader
 *   hello_pool publish   publishes alone: the document stays until `polykvctl rm hello_pool`
 *   hello_pool read      reads alone
 *
 * A real producer has K and V from a model's prefill; here they are a formula, so that the reader
 * can tell whether it got what was published. polykvd must run.
 */
#include <errno.h>
#include <math.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "polykv/polykv.h"

enum { LAYERS = 4, KV_HEADS = 2, HEAD_DIM = 64, TOKENS = 1000, SEGMENT_TOKENS = 256 };
static const char kName[] = "hello_pool";
/* k8v8 stores a row of values up to 1 in steps of about 1/127, K after taking its mean away. */
static const float kTolerance = 0.02F;

extern char** environ;

static int fail(const char* what) {
  fprintf(stderr, "hello_pool: %s: %s\n", what, polykv_last_error());
  return 1;
}

static float value_of(int is_v, uint32_t layer, uint64_t token, uint32_t kv_head, uint32_t dim) {
  return sinf(0.1F * (float)token + 1.7F * (float)dim + (float)(layer + 10 * kv_head + 100 * is_v));
}

/* One layer's K or V for a token range, dense [token, kv_head, dim]. */
static void fill(float* values, int is_v, uint32_t layer, uint64_t first, uint64_t count) {
  for (uint64_t token = 0; token < count; ++token) {
    for (uint32_t head = 0; head < KV_HEADS; ++head) {
      for (uint32_t dim = 0; dim < HEAD_DIM; ++dim) {
        *values++ = value_of(is_v, layer, first + token, head, dim);
      }
    }
  }
}

static int publish_segment(polykv_publisher* publisher, uint64_t first, uint64_t count) {
  static float k[SEGMENT_TOKENS * KV_HEADS * HEAD_DIM];
  static float v[SEGMENT_TOKENS * KV_HEADS * HEAD_DIM];
  polykv_segment* segment = NULL;
  if (polykv_segment_begin(publisher, count, &segment) != POLYKV_OK) return fail("begin");
  for (uint32_t layer = 0; layer < LAYERS; ++layer) {
    fill(k, 0, layer, first, count);
    fill(v, 1, layer, first, count);
    polykv_kv_source source;
    polykv_kv_source_init(&source);
    source.k = k;
    source.v = v;
    if (polykv_segment_encode_layer(segment, layer, &source) != POLYKV_OK) {
      fail("encode");
      polykv_segment_abort(segment);
      return 1;
    }
  }
  /* From here on nobody, this process included, can change the bytes. */
  return polykv_segment_commit(segment) == POLYKV_OK ? 0 : fail("commit");
}

static int publish_document(polykv_session* session) {
  static uint32_t tokens[TOKENS];
  for (uint32_t i = 0; i < TOKENS; ++i) tokens[i] = i * 7 % 50000;
  polykv_layer_geometry layers[LAYERS];
  for (uint32_t i = 0; i < LAYERS; ++i) {
    layers[i] = (polykv_layer_geometry){KV_HEADS, HEAD_DIM, HEAD_DIM, 0};
  }
  polykv_model model;
  polykv_model_init(&model);
  model.name = "a formula";
  memset(model.fingerprint, 0x42, sizeof model.fingerprint);
  model.layer_count = LAYERS;
  model.layers = layers;

  polykv_acquire_options options;
  polykv_acquire_options_init(&options);
  options.model = &model;
  options.tokens = tokens;
  options.token_count = TOKENS;
  options.profile = POLYKV_PROFILE_K8V8;
  options.flags = POLYKV_ACQUIRE_MAY_PRODUCE | POLYKV_ACQUIRE_WAIT | POLYKV_ACQUIRE_REPLACE_NAME;
  options.publish_name = kName;

  /* Whoever asks first computes; everybody else waits and reads. */
  polykv_lease* lease = NULL;
  polykv_publisher* publisher = NULL;
  if (polykv_document_acquire(session, &options, &lease, &publisher) != POLYKV_OK) {
    return fail("acquire");
  }
  if (lease != NULL) {
    printf("process %d: the document is there already\n", (int)getpid());
    return polykv_lease_release(lease) == POLYKV_OK ? 0 : fail("release");
  }
  for (uint64_t first = 0; first < TOKENS; first += SEGMENT_TOKENS) {
    const uint64_t left = TOKENS - first;
    if (publish_segment(publisher, first, left < SEGMENT_TOKENS ? left : SEGMENT_TOKENS) != 0) {
      polykv_publisher_abort(publisher);
      return 1;
    }
  }
  if (polykv_publisher_finish(publisher, NULL) != POLYKV_OK) return fail("finish");
  printf("process %d: published %d tokens, %d layers\n", (int)getpid(), TOKENS, LAYERS);
  return 0;
}

/* Decodes one layer into a cache laid out [kv_head, token, dim], as Hugging Face has it. */
static int check_layer(const polykv_lease* lease, uint32_t layer, float* worst) {
  static float k[KV_HEADS][TOKENS][HEAD_DIM];
  static float v[KV_HEADS][TOKENS][HEAD_DIM];
  polykv_decode_options options;
  polykv_decode_options_init(&options);
  options.token_count = TOKENS;
  options.k = k;
  options.v = v;
  options.k_strides = (polykv_strides){TOKENS * HEAD_DIM, HEAD_DIM, 1};
  options.v_strides = options.k_strides;
  if (polykv_layer_decode(lease, layer, &options) != POLYKV_OK) return fail("decode");
  for (uint32_t head = 0; head < KV_HEADS; ++head) {
    for (uint32_t token = 0; token < TOKENS; ++token) {
      for (uint32_t dim = 0; dim < HEAD_DIM; ++dim) {
        const float k_error = fabsf(k[head][token][dim] - value_of(0, layer, token, head, dim));
        const float v_error = fabsf(v[head][token][dim] - value_of(1, layer, token, head, dim));
        *worst = fmaxf(*worst, fmaxf(k_error, v_error));
      }
    }
  }
  return 0;
}

static int read_document(polykv_session* session) {
  polykv_acquire_options options;
  polykv_acquire_options_init(&options);
  options.name = kName;
  polykv_lease* lease = NULL;
  if (polykv_document_acquire(session, &options, &lease, NULL) != POLYKV_OK) return fail("acquire");
  polykv_document_info info;
  polykv_document_info_init(&info);
  float worst = 0;
  int result = polykv_lease_info(lease, &info) == POLYKV_OK ? 0 : fail("info");
  for (uint32_t layer = 0; result == 0 && layer < LAYERS; ++layer) {
    result = check_layer(lease, layer, &worst);
  }
  if (result == 0 && !(worst <= kTolerance)) {
    fprintf(stderr, "hello_pool: a value is off by %g, more than %g\n", (double)worst,
            (double)kTolerance);
    result = 1;
  }
  if (result == 0) {
    printf(
        "process %d: read %llu tokens from %u segments, %llu bytes for %llu as bf16; "
        "largest error %.4f\n",
        (int)getpid(), (unsigned long long)info.token_count, info.segment_count,
        (unsigned long long)info.stored_bytes, (unsigned long long)info.bf16_bytes, (double)worst);
  }
  if (polykv_lease_release(lease) != POLYKV_OK && result == 0) result = fail("release");
  return result;
}

/* Another process, with nothing inherited: a handle does not survive fork(). */
static int run_reader(void) {
  char program[] = "/proc/self/exe";
  char mode[] = "read";
  char* arguments[] = {program, mode, NULL};
  pid_t child = -1;
  int status = 0;
  fflush(stdout);
  if (posix_spawn(&child, program, NULL, NULL, arguments, environ) != 0) {
    perror("hello_pool: start the reader");
    return 1;
  }
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}

int main(int argument_count, char** arguments) {
  const char* mode = argument_count > 1 ? arguments[1] : "both";
  const int publishes = strcmp(mode, "publish") == 0 || strcmp(mode, "both") == 0;
  if (argument_count > 2 || (!publishes && strcmp(mode, "read") != 0)) {
    fprintf(stderr, "usage: hello_pool [publish|read]\n");
    return POLYKV_ERR_INVALID_ARGUMENT;
  }
  polykv_session* session = NULL;
  const polykv_status connected = polykv_session_connect(NULL, &session);
  if (connected != POLYKV_OK) {
    fail("connect");
    return (int)connected;
  }
  int result = publishes ? publish_document(session) : read_document(session);
  if (result == 0 && strcmp(mode, "both") == 0) result = run_reader();
  polykv_session_close(session);
  return result;
}
