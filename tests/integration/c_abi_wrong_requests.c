/* Requests that break a rule: each has its status and one line of text, and changes nothing. */
#include "tests/integration/c_abi_test.h"

/* A caller built against a later version of the header. */
void structs_of_later_versions(polykv_session* session) {
  struct {
    polykv_acquire_options known;
    uint64_t added;
  } later;
  memset(&later, 0, sizeof later);
  polykv_acquire_options_init(&later.known);
  later.known.struct_size = sizeof later;
  later.known.name = "nothing of that name";
  polykv_lease* lease = NULL;
  CHECK_FAILS(POLYKV_ERR_NOT_FOUND, polykv_document_acquire(session, &later.known, &lease, NULL));
  later.added = 1;
  CHECK_FAILS(POLYKV_ERR_VERSION, polykv_document_acquire(session, &later.known, &lease, NULL));

  struct {
    polykv_daemon_status known;
    uint64_t added;
  } status;
  memset(&status, 0, sizeof status);
  status.known.struct_size = sizeof status;
  status.added = 77;
  CHECK(polykv_session_daemon_status(session, &status.known) == POLYKV_OK);
  CHECK(status.added == 77 && status.known.struct_size == sizeof status);
  CHECK(status.known.pid > 0);
  status.known.struct_size = 0;
  CHECK_FAILS(POLYKV_ERR_INVALID_ARGUMENT, polykv_session_daemon_status(session, &status.known));
}

/* Any number may stand in an enum of a C caller, or of one that was built against a later header. */
static void unknown_enumerators(polykv_session* session) {
  polykv_lease* lease = NULL;
  polykv_publisher* publisher = NULL;
  const polykv_model right = the_model();
  polykv_acquire_options options = producing(&right, (polykv_profile)0xfffffff0U);
  CHECK_FAILS(POLYKV_ERR_INVALID_ARGUMENT,
              polykv_document_acquire(session, &options, &lease, &publisher));
  CHECK(strstr(polykv_last_error(), "profile 4294967280 is unknown") != NULL);
  polykv_model model = the_model();
  options = producing(&model, POLYKV_PROFILE_K8V8);
  model.rope_kind = (polykv_rope_kind)17;
  CHECK_FAILS(POLYKV_ERR_INVALID_ARGUMENT,
              polykv_document_acquire(session, &options, &lease, &publisher));
  model = the_model();
  model.rope_scaling = (polykv_rope_scaling)17;
  CHECK_FAILS(POLYKV_ERR_INVALID_ARGUMENT,
              polykv_document_acquire(session, &options, &lease, &publisher));
  model = the_model();
  model.source_dtype = (polykv_dtype)17;
  CHECK_FAILS(POLYKV_ERR_INVALID_ARGUMENT,
              polykv_document_acquire(session, &options, &lease, &publisher));
  CHECK(lease == NULL && publisher == NULL);

  polykv_ingest_options ingest;
  polykv_ingest_options_init(&ingest);
  ingest.model_name = "a model that is not configured";
  ingest.tokens = tokens;
  ingest.token_count = TOKENS;
  ingest.profile = (polykv_profile)17;
  CHECK_FAILS(POLYKV_ERR_INVALID_ARGUMENT, polykv_document_ingest(session, &ingest, &lease));
  CHECK(strstr(polykv_last_error(), "profile 17 is unknown") != NULL);
}

/* A name of a model that would break a listing, or somebody's JSON. */
static void wrong_model_names(polykv_session* session) {
  static const char* const wrong[] = {"new\nline", "\xff", "\xed\xa0\x80", "\xe0\x80\xaf",
                                      "\xf4\x90\x80\x80"};
  char long_name[60000];
  polykv_lease* lease = NULL;
  polykv_publisher* publisher = NULL;
  polykv_model model = the_model();
  polykv_acquire_options options = producing(&model, POLYKV_PROFILE_K8V8);
  memset(long_name, 'x', sizeof long_name);
  long_name[sizeof long_name - 1] = '\0';
  model.name = long_name;
  CHECK_FAILS(POLYKV_ERR_INVALID_ARGUMENT,
              polykv_document_acquire(session, &options, &lease, &publisher));
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; ++i) {
    model.name = wrong[i];
    CHECK_FAILS(POLYKV_ERR_INVALID_ARGUMENT,
                polykv_document_acquire(session, &options, &lease, &publisher));
    CHECK(strstr(polykv_last_error(), "model") != NULL);
  }
  CHECK(lease == NULL && publisher == NULL);
}

void wrong_requests(polykv_session* session) {
  polykv_lease* lease = NULL;
  polykv_publisher* publisher = NULL;
  polykv_acquire_options options;
  polykv_acquire_options_init(&options);
  CHECK_FAILS(POLYKV_ERR_INVALID_ARGUMENT,
              polykv_document_acquire(session, &options, &lease, NULL));
  options.name = "a";
  options.model_name = "b";
  CHECK_FAILS(POLYKV_ERR_INVALID_ARGUMENT,
              polykv_document_acquire(session, &options, &lease, NULL));
  options.model_name = NULL;
  options.name = "control\ncharacter";
  CHECK_FAILS(POLYKV_ERR_INVALID_ARGUMENT,
              polykv_document_acquire(session, &options, &lease, NULL));
  options.name = "unknown";
  CHECK_FAILS(POLYKV_ERR_NOT_FOUND, polykv_document_acquire(session, &options, &lease, NULL));
  CHECK_FAILS(POLYKV_ERR_INVALID_ARGUMENT, polykv_document_acquire(session, &options, NULL, NULL));
  CHECK_FAILS(POLYKV_ERR_INVALID_ARGUMENT, polykv_document_acquire(NULL, &options, &lease, NULL));
  CHECK_FAILS(POLYKV_ERR_INVALID_ARGUMENT, polykv_document_acquire(session, NULL, &lease, NULL));

  polykv_model model = the_model();
  options = producing(&model, POLYKV_PROFILE_ANY);
  CHECK_FAILS(POLYKV_ERR_INVALID_ARGUMENT,
              polykv_document_acquire(session, &options, &lease, &publisher));
  options = producing(&model, POLYKV_PROFILE_K8V8);
  options.token_count = 0;
  CHECK_FAILS(POLYKV_ERR_EMPTY_DOCUMENT,
              polykv_document_acquire(session, &options, &lease, &publisher));
  options = producing(&model, POLYKV_PROFILE_K8V8);
  options.tokens = NULL;
  CHECK_FAILS(POLYKV_ERR_INVALID_ARGUMENT,
              polykv_document_acquire(session, &options, &lease, &publisher));
  options = producing(&model, POLYKV_PROFILE_K8V8);
  model.layer_count = 0;
  CHECK_FAILS(POLYKV_ERR_INVALID_ARGUMENT,
              polykv_document_acquire(session, &options, &lease, &publisher));
  model = the_model();
  options = producing(&model, POLYKV_PROFILE_K8V8);
  options.flags = 0;
  CHECK_FAILS(POLYKV_ERR_NOT_FOUND, polykv_document_acquire(session, &options, &lease, NULL));
  CHECK(lease == NULL && publisher == NULL);
  unknown_enumerators(session);
  wrong_model_names(session);

  polykv_ingest_options ingest;
  polykv_ingest_options_init(&ingest);
  CHECK_FAILS(POLYKV_ERR_INVALID_ARGUMENT, polykv_document_ingest(session, &ingest, &lease));
  ingest.model_name = "a model that is not configured";
  CHECK_FAILS(POLYKV_ERR_INVALID_ARGUMENT, polykv_document_ingest(session, &ingest, &lease));
  CHECK_FAILS(POLYKV_ERR_NOT_FOUND, polykv_document_remove(session, "unknown", NULL));
  CHECK_FAILS(POLYKV_ERR_INVALID_ARGUMENT, polykv_document_remove(session, NULL, NULL));
  CHECK_FAILS(POLYKV_ERR_INVALID_ARGUMENT, polykv_document_list(session, NULL, NULL));
}
