// polykvctl's exit codes, messages and JSON, against polykvd and a worker that computes nothing.
#include <sys/stat.h>

#include <catch2/catch.hpp>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "common/result.h"
#include "tests/support/daemon_process.h"
#include "tests/support/gguf_builder.h"
#include "tests/support/require_ok.h"
#include "tests/support/run_program.h"
#include "tests/support/synthetic_document.h"

using namespace polykv;
using namespace polykv::test;
using Json = nlohmann::json;

namespace {

const std::string kNowhere = "/nowhere/polykv.sock";

/// Two runs of one command may name different processes.
std::string without_digits(std::string text) {
  std::erase_if(text, [](char c) { return c >= '0' && c <= '9'; });
  return text;
}

class Tool {
 public:
  explicit Tool(std::string socket_path, std::optional<uid_t> user = std::nullopt)
      : socket_path_(std::move(socket_path)), user_(user) {}

  ProgramRun operator()(std::vector<std::string> arguments, const std::string& input = "") const {
    return run_program(POLYKV_CTL_PATH, std::move(arguments),
                       {input, {"POLYKV_SOCKET=" + socket_path_}, user_});
  }
  /// Must succeed, say nothing on standard error, and print one JSON object.
  Json json(std::vector<std::string> arguments, const std::string& input = "") const {
    arguments.emplace_back("--json");
    const ProgramRun run = (*this)(std::move(arguments), input);
    INFO(run.errors);
    CHECK(run.exit_code == 0);
    CHECK(run.errors.empty());
    const Json result = Json::parse(run.output, nullptr, false);
    REQUIRE(result.is_object());
    return result;
  }
  /// Must fail with this code and one clear line; the same as JSON. Returns the message.
  std::string failure(polykv_status code, const std::vector<std::string>& arguments,
                      const std::string& input = "") const {
    const ProgramRun run = (*this)(arguments, input);
    INFO(run.errors);
    CHECK(run.exit_code == code);
    // Progress may stand before it.
    const size_t begin = run.errors.find("polykvctl: ");
    REQUIRE(begin != std::string::npos);
    CHECK((begin == 0 || run.errors[begin - 1] == '\n'));
    CHECK(run.errors.find('\n', begin) == run.errors.size() - 1);
    std::vector<std::string> with_json = arguments;
    with_json.emplace_back("--json");
    const ProgramRun json_run = (*this)(with_json, input);
    CHECK(json_run.exit_code == code);
    const Json error = Json::parse(json_run.errors, nullptr, false);
    REQUIRE(error.is_object());
    CHECK(error["error"]["code"] == static_cast<int>(code));
    CHECK(error["error"]["status"] == status_name(code));
    std::string message = run.errors.substr(begin + std::string("polykvctl: ").size());
    message.pop_back();  // its newline
    CHECK(without_digits(error["error"]["message"]) == without_digits(message));
    return message;
  }

 private:
  std::string socket_path_;
  std::optional<uid_t> user_;
};

bool contains(const std::string& text, const std::string& part) {
  INFO(text);
  return text.find(part) != std::string::npos;
}

/// A daemon whose worker is the fake one, and files to put.
struct Fixture {
  DaemonProcess daemon{{"--worker", POLYKV_FAKE_WORKER}};
  Tool tool{daemon.socket_path()};
  std::string model = daemon.folder().write("model.gguf", "the weights of a fake model");

  std::string file(const std::string& name, const std::string& text) const {
    return daemon.folder().write(name, text);
  }
};

}  // namespace

TEST_CASE("a wrong command line exits with 2 and says how to get help") {
  const Tool tool(kNowhere);
  for (const std::vector<std::string>& arguments : std::vector<std::vector<std::string>>{
           {},
           {"frobnicate"},
           {"ls", "--frobnicate"},
           {"ls", "surplus"},
           {"show"},
           {"rm"},
           {"verify"},
           {"put"},
           {"put", "file"},
           {"put", "file", "--model", "m", "--share", "everybody"},
           {"put", "file", "--model", "m", "--name", ""},
           {"extend", "document"},
           {"extend", "document", "file"},
           {"tokenize"},
           {"tokenize", "--model", "m", "--text", "a", "file"}}) {
    CHECK(contains(tool.failure(POLYKV_ERR_INVALID_ARGUMENT, arguments), "polykvctl --help"));
  }
  CHECK(contains(tool.failure(POLYKV_ERR_INVALID_ARGUMENT, {"frobnicate"}), "'frobnicate'"));
}

TEST_CASE("help and version are no errors") {
  const Tool tool(kNowhere);
  for (const char* flag : {"--help", "--version"}) {
    const ProgramRun run = tool({flag});
    CHECK(run.exit_code == 0);
    CHECK(run.errors.empty());
    CHECK(!run.output.empty());
  }
  CHECK(contains(tool({"put", "--help"}).output, "--chat-head"));
}

TEST_CASE("output that did not get out is no success") {
  for (const char* where : {">/dev/full", ">&-"}) {
    const ProgramRun run = run_program(
        "/bin/sh", {"-c", std::string("exec \"$0\" --help ") + where, POLYKV_CTL_PATH}, {});
    CHECK(run.exit_code == POLYKV_ERR_SYSTEM);
    CHECK(contains(run.errors, "write to standard output"));
  }
}

TEST_CASE("without a daemon each command that needs one exits with 9 and says how to start it",
          "[memfd]") {
  const Tool tool(kNowhere);
  const TemporaryFolder folder;
  const std::string model = folder.write("m.gguf", "x");
  const std::string text = folder.write("a.txt", "text");
  for (const std::vector<std::string>& arguments :
       std::vector<std::vector<std::string>>{{"ls"},
                                             {"show", "a"},
                                             {"rm", "a"},
                                             {"verify", "a"},
                                             {"status"},
                                             {"put", text, "--model", model}}) {
    const std::string message = tool.failure(POLYKV_ERR_DAEMON_UNREACHABLE, arguments);
    CHECK(contains(message, kNowhere));
    CHECK(contains(message, "start polykvd"));
  }
  const ProgramRun doctor = tool({"doctor"});
  CHECK(doctor.exit_code == POLYKV_ERR_DAEMON_UNREACHABLE);
  CHECK(contains(doctor.output, "problem  daemon"));
}

TEST_CASE("an unknown document exits with 3 and says where to look") {
  const DaemonProcess daemon;
  const Tool tool(daemon.socket_path());
  const std::string digest(64, 'a');
  for (const char* command : {"show", "rm", "verify"}) {
    CHECK(contains(tool.failure(POLYKV_ERR_NOT_FOUND, {command, "no-such"}), "no-such"));
    CHECK(contains(tool.failure(POLYKV_ERR_NOT_FOUND, {command, "no-such"}), "polykvctl ls"));
    tool.failure(POLYKV_ERR_NOT_FOUND, {command, digest});
  }
  CHECK(
      contains(tool.failure(POLYKV_ERR_INVALID_ARGUMENT, {"show", "a", "--codec", "zip"}), "zip"));
}

TEST_CASE("show tells a document's certificate and its layers' profiles, and ls what auto chose") {
  const DaemonProcess daemon;
  const Tool tool(daemon.socket_path());
  client::Session session = connect_to(daemon.socket_path());
  SyntheticDocument document(300);
  document.layers = {{1, 64, 64, 0}, {1, 20, 20, 0}};
  document.profile = POLYKV_PROFILE_AUTO;
  client::Publisher publisher = document.become_producer(session, "judged");
  REQUIRE_OK(document.examine_all(publisher, 300));
  document.publish_segment(publisher, 300);
  REQUIRE_OK(publisher.finish());

  const Json shown = tool.json({"show", "judged"})["document"];
  CHECK(shown["profile"] == "auto");
  const Json& layers = shown["model_details"]["layers"];
  CHECK(layers[1]["profile"] == "k8v8");
  CHECK(layers[1]["certificate"]["query_count"] == 2);
  const double first = layers[0]["certificate"]["relative_error"];
  const double second = layers[1]["certificate"]["relative_error"];
  CHECK(shown["certificate"]["relative_error_worst"] == std::max(first, second));
  CHECK(shown["certificate"]["relative_error_mean"].get<double>() == Approx((first + second) / 2));
  const std::string profiles = shown["layer_profiles"];
  CHECK(contains(profiles, "1 k8v8"));
  const std::string text = tool({"show", "judged"}).output;
  CHECK(contains(text, "auto (" + profiles + ")"));
  CHECK(contains(text, "relative error of attention: "));
  CHECK(contains(tool({"ls"}).output, "auto (" + profiles + ")"));
  CHECK(tool.json({"ls"})["documents"][0]["certificate"] == shown["certificate"]);

  // Without queries there is none.
  SyntheticDocument plain(300, 2);
  plain.publish(session, "plain");
  const Json other = tool.json({"show", "plain"})["document"];
  CHECK(other["certificate"].is_null());
  CHECK(other["layer_profiles"] == "2 exact");
  CHECK(!contains(tool({"show", "plain"}).output, "certificate"));
}

TEST_CASE("ls, show, verify, status and rm tell about a published document") {
  const DaemonProcess daemon;
  const Tool tool(daemon.socket_path());
  CHECK(tool.json({"ls"})["documents"].empty());
  client::Session session = connect_to(daemon.socket_path());
  const SyntheticDocument document(600);
  client::Lease lease = document.publish(session, "a manual", 300);

  const Json listed = tool.json({"ls"})["documents"];
  REQUIRE(listed.size() == 1);
  CHECK(listed[0]["names"] == Json::array({"a manual"}));
  CHECK(listed[0]["profile"] == "exact");
  CHECK(listed[0]["token_count"] == 600);
  CHECK(listed[0]["segment_count"] == 2);
  CHECK(listed[0]["lease_count"] == 1);
  CHECK(listed[0]["state"] == "sealed");
  CHECK(listed[0]["public"] == false);
  CHECK(listed[0]["stored_bytes"] == lease.info().stored_bytes);
  CHECK(contains(tool({"ls"}).output, "a manual"));

  const std::string digest = listed[0]["digest"];
  for (const std::string& how : {std::string("a manual"), digest}) {
    const Json shown = tool.json({"show", how})["document"];
    CHECK(shown["digest"] == digest);
    CHECK(shown["model_details"]["layer_count"] == 2);
    CHECK(shown["model_details"]["layers"][1]["sliding_window"] == 128);
    CHECK(shown["model_details"]["source_dtype"] == "f32");
    const Json verified = tool.json({"verify", how, "--codec", "exact"});
    CHECK(verified["verified"] == true);
    CHECK(verified["document"]["digest"] == digest);
  }
  CHECK(contains(tool({"show", "a manual"}).output, digest));
  CHECK(contains(tool({"verify", "a manual"}).output, "is right"));
  tool.failure(POLYKV_ERR_NOT_FOUND, {"show", "a manual", "--codec", "k8v8"});

  const Json status = tool.json({"status"})["daemon"];
  CHECK(status["pid"] == daemon.pid());
  CHECK(status["document_count"] == 1);
  CHECK(status["tokens_committed_total"] == 600);
  CHECK(contains(tool({"status"}).output, "1 in 2 segments"));

  REQUIRE_OK(lease.release());
  CHECK(tool.json({"rm", "a manual"})["removed"] == "a manual");
  CHECK(tool.json({"ls"})["documents"].empty());
  CHECK(tool.json({"status"})["daemon"]["stored_bytes"] == 0);
}

TEST_CASE("--json and --socket may stand before or behind the command") {
  const DaemonProcess daemon;
  const Tool tool(kNowhere);
  for (const std::vector<std::string>& arguments :
       std::vector<std::vector<std::string>>{{"--socket", daemon.socket_path(), "--json", "ls"},
                                             {"ls", "--json", "--socket", daemon.socket_path()}}) {
    const ProgramRun run = tool(arguments);
    CHECK(run.exit_code == 0);
    CHECK(Json::parse(run.output, nullptr, false).contains("documents"));
  }
}

TEST_CASE("put computes a document, names it after the file, and knows it the second time") {
  const Fixture fixture;
  const std::string text = fixture.file("notes.txt", "some text of a document");
  const Json put = fixture.tool.json({"put", text, "--model", fixture.model});
  CHECK(put["computed"] == true);
  CHECK(put["worker_memory_bytes"] > 0);
  CHECK(put["document"]["names"] == Json::array({"notes.txt"}));
  CHECK(put["document"]["token_count"] == 23);
  CHECK(put["document"]["profile"] == "k5v4");
  const Json again = fixture.tool.json({"put", text, "--model", fixture.model});
  CHECK(again["computed"] == false);
  CHECK(again["document"]["digest"] == put["document"]["digest"]);
  CHECK(contains(fixture.tool({"put", text, "--model", fixture.model}).output, "already"));

  const Json exact = fixture.tool.json(
      {"put", "-", "--name", "from stdin", "--model", fixture.model, "--codec", "exact"},
      "other text");
  CHECK(exact["document"]["names"] == Json::array({"from stdin"}));
  CHECK(exact["document"]["profile"] == "exact");
  CHECK(exact["document"]["token_count"] == 10);
}

TEST_CASE("put reports progress in plain lines when standard error is no terminal") {
  const Fixture fixture;
  const std::string text = fixture.file("long.txt", std::string(5000, 'x'));
  const ProgramRun run = fixture.tool({"put", text, "--model", fixture.model});
  CHECK(run.exit_code == 0);
  CHECK(contains(run.errors, "long.txt: prefilling"));
  CHECK(contains(run.errors, "of 5000 tokens"));
  CHECK(!contains(run.errors, "\033"));
  CHECK(contains(run.output, "long.txt: 5000 tokens"));
  CHECK(std::count(run.errors.begin(), run.errors.end(), '\n') < 20);
}

TEST_CASE("put --replace takes a name over, and without it says that the name is taken") {
  const Fixture fixture;
  const std::string first = fixture.file("first.txt", "first text");
  const std::string second = fixture.file("second.txt", "second text");
  fixture.tool.json({"put", first, "--name", "n", "--model", fixture.model});
  CHECK(contains(fixture.tool.failure(POLYKV_ERR_ALREADY_EXISTS,
                                      {"put", second, "--name", "n", "--model", fixture.model}),
                 "n"));
  fixture.tool.json({"put", second, "--name", "n", "--model", fixture.model, "--replace"});
  CHECK(fixture.tool.json({"show", "n"})["document"]["token_count"] == 11);
}

TEST_CASE("put says what is wrong with its files") {
  const Fixture fixture;
  const std::string text = fixture.file("a.txt", "text");
  const auto fails = [&](polykv_status code, std::vector<std::string> arguments,
                         const std::string& with) {
    arguments.insert(arguments.begin(), "put");
    CHECK(contains(fixture.tool.failure(code, arguments), with));
  };
  fails(POLYKV_ERR_NOT_FOUND, {text, "--model", "/no/such/model.gguf"}, "[models]");
  fails(POLYKV_ERR_NOT_FOUND, {text, "--model", "no-such.gguf"}, "no-such.gguf");
  fails(POLYKV_ERR_NOT_FOUND, {text, "--model", "unconfigured"}, "unconfigured");
  fails(POLYKV_ERR_INVALID_ARGUMENT, {text, "--model", "/tmp/"}, "folder");
  const std::string fifo = fixture.daemon.folder().path() + "/fifo";
  REQUIRE(mkfifo(fifo.c_str(), 0600) == 0);
  fails(POLYKV_ERR_INVALID_ARGUMENT, {text, "--model", fifo}, "no regular file");
  fails(POLYKV_ERR_NOT_FOUND, {"/no/such.txt", "--model", fixture.model}, "/no/such.txt");
  fails(POLYKV_ERR_INVALID_ARGUMENT, {"/tmp", "--model", fixture.model}, "folder");
  fails(POLYKV_ERR_INVALID_ARGUMENT, {"-", "--model", fixture.model}, "--name");
  fails(POLYKV_ERR_INVALID_ARGUMENT, {text, "--model", fixture.model, "--codec", "zip"}, "zip");
  // show and rm would take it for a digest, of another document perhaps.
  fails(POLYKV_ERR_INVALID_ARGUMENT,
        {text, "--model", fixture.model, "--name", std::string(64, 'a')}, "digest");
  fails(POLYKV_ERR_NOT_FOUND, {text, "--model", fixture.model, "--before", "/no/such"}, "--before");
  const std::string empty = fixture.file("empty.txt", "");
  fails(POLYKV_ERR_EMPTY_DOCUMENT, {empty, "--model", fixture.model}, "empty.txt");
  fails(POLYKV_ERR_EMPTY_DOCUMENT, {"-", "--name", "n", "--model", fixture.model}, "no tokens");
}

TEST_CASE("put shares with everybody only what is of a configured model and in host memory") {
  const Fixture fixture;
  const std::string text = fixture.file("a.txt", "text");
  const auto [code, why] = TestDevice::is_wanted()
                               ? std::pair(POLYKV_ERR_UNSUPPORTED, "--backing memfd")
                               : std::pair(POLYKV_ERR_PERMISSION, "public");
  CHECK(contains(
      fixture.tool.failure(code, {"put", text, "--model", fixture.model, "--share", "public"}),
      why));
  CHECK(fixture.tool.json({"ls"})["documents"].empty());
}

TEST_CASE("a file that the user may not read is a matter of permission") {
  if (geteuid() != 0) {
    WARN("skipped: needs root, to make files that another user may not read");
    return;
  }
  const Fixture fixture;
  const Tool tool(fixture.daemon.socket_path(), 12345);
  const std::string text = fixture.file("a.txt", "text");
  const std::string secret_text = fixture.file("secret.txt", "text");
  const std::string secret_model = fixture.file("secret.gguf", "a model");
  for (const std::string& file : {secret_text, secret_model})
    std::filesystem::permissions(file, std::filesystem::perms::owner_read);
  const auto fails = [&](const std::vector<std::string>& arguments, const std::string& with) {
    CHECK(contains(tool.failure(POLYKV_ERR_PERMISSION, arguments), with));
  };
  fails({"put", text, "--model", secret_model}, "secret.gguf");
  fails({"put", secret_text, "--model", fixture.model}, "secret.txt");
  fails({"put", text, "--before", secret_text, "--model", fixture.model}, "--before");
  fails({"tokenize", text, "--model", secret_model}, "secret.gguf");
}

TEST_CASE("tokenize prints the ids that a document would have") {
  const Tool tool(kNowhere);  // it needs no daemon
  const TemporaryFolder folder;
  const std::string model = folder.write("tiny.gguf", tiny_llama().build());
  const auto ids = [&](std::vector<std::string> arguments, const std::string& input = "") {
    arguments.insert(arguments.begin(), {"tokenize", "--model", model});
    const Json result = tool.json(std::move(arguments), input);
    CHECK(result["token_count"] == result["ids"].size());
    return result["ids"].get<std::vector<uint32_t>>();
  };
  // The small model's tokens are three special ones, the 256 bytes, and a few merges.
  const std::vector<uint32_t> b_and_newline = {3 + 'b', 3 + '\n'};
  CHECK(ids({"--text", "b\n"}) == b_and_newline);
  CHECK(ids({folder.write("text", "b\n")}) == b_and_newline);
  CHECK(ids({"-"}, "b\n") == b_and_newline);
  CHECK(ids({"--text", "<|im_end|>"}).size() > 1);
  CHECK(ids({"--text", "<|im_end|>", "--parse-special"}) == std::vector<uint32_t>{2});
  CHECK(ids({"--text", "b", "--before", folder.write("before", "\n")}) ==
        std::vector<uint32_t>{3 + '\n', 3 + 'b'});
  CHECK(contains(
      tool.failure(POLYKV_ERR_MODEL_FORMAT,
                   {"tokenize", "--model", folder.write("bad", "no model"), "--text", "b"}),
      "bad"));
}

TEST_CASE("put passes on what the worker says, and survives its death") {
  const Fixture fixture;
  const auto put = [&](polykv_status code, const std::string& text, const std::string& model) {
    return fixture.tool.failure(code, {"put", fixture.file("w.txt", text), "--model", model});
  };
  CHECK(contains(put(POLYKV_ERR_BUDGET, "refuse this", fixture.model), "refuses"));
  const std::string bad = fixture.file("bad.gguf", "fail its magic is wrong");
  const std::string malformed = put(POLYKV_ERR_MODEL_FORMAT, "text", bad);
  CHECK(contains(malformed, "its magic is wrong"));
  CHECK(contains(malformed, bad));
  CHECK(contains(put(POLYKV_ERR_WORKER, "crash now", fixture.model), "polykv-prefill"));
  CHECK(fixture.tool.json({"ls"})["documents"].empty());
  CHECK(fixture.tool({"put", fixture.file("w.txt", "good"), "--model", fixture.model}).exit_code ==
        0);
}

// With documents in device memory: cuda_tools_test.
TEST_CASE("doctor's findings have a name, a health and a detail, and remedies where due",
          "[memfd]") {
  const DaemonProcess daemon;
  const Tool tool(daemon.socket_path());
  const Json found = tool.json({"doctor"});
  CHECK(found["problem_count"] == 0);
  std::map<std::string, Json> checks;
  for (const Json& check : found["checks"]) {
    checks[check["check"]] = check;
    CHECK(!check["detail"].get<std::string>().empty());
    const bool needs_remedy = check["health"] == "warning" || check["health"] == "problem";
    CHECK(check["remedy"].get<std::string>().empty() != needs_remedy);
  }
  for (const char* name : {"cpu", "kernel", "sealed memory", "pidfd", "user", "memory",
                           "descriptors", "mappings", "gpu", "socket", "daemon", "prefill"}) {
    INFO(name);
    CHECK(checks.count(name) == 1);
  }
  CHECK(contains(checks["daemon"]["detail"], std::to_string(daemon.pid())));
  CHECK(checks["sealed memory"]["health"] == "ok");
  const ProgramRun limited =
      run_program("/bin/sh", {"-c", "ulimit -n 256; exec " POLYKV_CTL_PATH " doctor"},
                  {"", {"POLYKV_SOCKET=" + daemon.socket_path()}, std::nullopt});
  CHECK(limited.exit_code == 0);
  CHECK(contains(limited.output, "warning  descriptors    RLIMIT_NOFILE 256"));
  const ProgramRun misspelt =
      run_program(POLYKV_CTL_PATH, {"doctor"},
                  {"", {"POLYKV_SOCKET=" + daemon.socket_path(), "POLYKV_CPU=axv2"}, std::nullopt});
  CHECK(contains(misspelt.output, "POLYKV_CPU is 'axv2', which means nothing and is ignored"));
}
