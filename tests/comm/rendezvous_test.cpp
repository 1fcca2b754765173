#include <chrono>
#include <map>
#include <netinet/in.h>
#include <resolv.h>
#include <sys/socket.h>
#include <unistd.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/launcher/rank_environment.h"
#include "comm/watch/store_calls.h"
#include "comm/watch/store_socket.h"
#include "tests/harness/listening_sockets.h"
#include "zeropage/check.h"
#include "zeropage/world.h"

namespace zeropage::comm::rendezvous_test {
namespace {

Variables from(std::map<std::string, std::string> values) {
  return [values = std::move(values)](const std::string& name) -> std::optional<std::string> {
    const auto at = values.find(name);
    return at == values.end() ? std::nullopt : std::optional(at->second);
  };
}

std::string refusal_of(const Variables& variables) {
  try {
    read_place(variables);
  } catch (const std::exception& error) {
    return memory::message_of(error);
  }
  return "";
}

TEST(RendezvousTest, IsAWorldOfOneWithoutVariables) {
  const Place place = read_place(from({}));
  EXPECT_EQ(place.world_size, 1);
  EXPECT_FALSE(launched_by_environment(from({})));
}

TEST(RendezvousTest, ReadsTorchrunsVariables) {
  const Place place = read_place(from({{"RANK", "5"},
                                       {"WORLD_SIZE", "8"},
                                       {"LOCAL_RANK", "1"},
                                       {"LOCAL_WORLD_SIZE", "4"},
                                       {"MASTER_ADDR", "node7"},
                                       {"MASTER_PORT", "29500"},
                                       {"TORCHELASTIC_RUN_ID", "x"},
                                       {"TORCHELASTIC_USE_AGENT_STORE", "True"}}));
  EXPECT_EQ(place.rank, 5);
  EXPECT_EQ(place.world_size, 8);
  EXPECT_EQ(place.local_rank, 1);
  EXPECT_EQ(place.local_world_size, 4);
  EXPECT_EQ(place.master_address, "node7");
  EXPECT_EQ(place.master_port, 29500);
  EXPECT_TRUE(place.launcher_serves_store);
  EXPECT_EQ(place.launcher, "torchrun");
}

// The variables as srun sets them for the last of 2 x 2 tasks, in a job of more nodes than the step has.
std::map<std::string, std::string> srun_task() {
  return {{"SLURM_PROCID", "3"},
          {"SLURM_NTASKS", "4"},
          {"SLURM_LOCALID", "1"},
          {"SLURM_NODEID", "1"},
          {"SLURM_JOB_ID", "4711"},
          {"SLURM_JOB_NODELIST", "gpu[01-05,9],login"},
          {"SLURM_STEP_ID", "0"},
          {"SLURM_STEP_NUM_TASKS", "4"},
          {"SLURM_STEP_NUM_NODES", "2"},
          {"SLURM_STEP_TASKS_PER_NODE", "2(x2)"},
          {"SLURM_STEP_NODELIST", "gpu[03-04]"}};
}

Variables srun_task_but(const std::map<std::string, std::string>& other) {
  auto values = other;
  values.merge(srun_task());
  return from(values);
}

TEST(RendezvousTest, ReadsSlurmsVariables) {
  const Place place = read_place(from(srun_task()));
  EXPECT_EQ(place.launcher, "Slurm");
  EXPECT_EQ(place.rank, 3);
  EXPECT_EQ(place.world_size, 4);
  EXPECT_EQ(place.local_rank, 1);
  EXPECT_EQ(place.master_address, "gpu03");
  EXPECT_GE(place.master_port, 20000);
  EXPECT_EQ(read_place(srun_task_but({{"SLURM_STEP_NODELIST", ""}})).master_address, "gpu01");
}

TEST(RendezvousTest, DerivesPortsThatLinuxGivesToNobody) {
  for (int job = 1; job <= 1000; ++job) {
    const int port = read_place(srun_task_but({{"SLURM_JOB_ID", std::to_string(job)}})).master_port;
    EXPECT_GE(port, 20000);
    EXPECT_LT(port, 32768);
  }
}

TEST(RendezvousTest, DerivesThePortFromJobStepAndRestartOnEveryRankAlike) {
  const auto port = [](const std::map<std::string, std::string>& other) {
    return read_place(srun_task_but(other)).master_port;
  };
  EXPECT_EQ(port({{"SLURM_PROCID", "0"}, {"SLURM_LOCALID", "0"}, {"SLURM_NODEID", "0"}}), port({}));
  EXPECT_NE(port({{"SLURM_JOB_ID", "4712"}}), port({}));
  EXPECT_NE(port({{"SLURM_STEP_ID", "1"}}), port({}));
  EXPECT_NE(port({{"SLURM_RESTART_COUNT", "1"}}), port({}));
  EXPECT_EQ(read_place(srun_task_but({{"SLURM_RESTART_COUNT", "1"}})).attempt, "1");
}

TEST(RendezvousTest, IgnoresASlurmShellOutsideSrun) {
  EXPECT_EQ(read_place(from({{"SLURM_NTASKS", "16"}})).world_size, 1);
}

TEST(RendezvousTest, NamesSlurmVariablesThatContradictEachOther) {
  struct Case {
    std::map<std::string, std::string> other;
    const char* refusal;
  };
  const std::vector<Case> cases = {
      {{{"SLURM_PROCID", "4"}}, "SLURM_PROCID=4 and SLURM_NTASKS=4 contradict each other"},
      {{{"SLURM_NTASKS", ""}}, "SLURM_PROCID is set but SLURM_NTASKS is not"},
      {{{"SLURM_STEP_ID", ""}},
       "SLURM_NTASKS=4 without SLURM_STEP_ID means that Slurm's batch script"},
      {{{"SLURM_STEP_NUM_TASKS", "2"}}, "SLURM_STEP_NUM_TASKS=2 and SLURM_NTASKS=4 contradict"},
      {{{"SLURM_STEP_TASKS_PER_NODE", "2,1"}},
       "SLURM_STEP_TASKS_PER_NODE=2,1 are 3 tasks and SLURM_NTASKS=4 contradict"},
      {{{"SLURM_STEP_NUM_NODES", "3"}}, "of 2 nodes and SLURM_STEP_NUM_NODES=3 contradict"},
      {{{"SLURM_NODEID", "2"}},
       "SLURM_NODEID=2 and SLURM_STEP_TASKS_PER_NODE=2(x2), which is of 2"},
      {{{"SLURM_LOCALID", "2"}}, "SLURM_LOCALID=2 and the 2 tasks that SLURM_STEP_TASKS_PER_NODE="},
      {{{"SLURM_STEP_TASKS_PER_NODE", "2(x2"}},
       "SLURM_STEP_TASKS_PER_NODE=2(x2 is no list of tasks"},
      {{{"SLURM_STEP_TASKS_PER_NODE", "two"}}, "SLURM_STEP_TASKS_PER_NODE=two is no list of tasks"},
      {{{"SLURM_STEP_TASKS_PER_NODE", "4(x0)"}}, "is no list of tasks"},
      {{{"SLURM_STEP_NODELIST", "gpu[03-"}}, "=gpu[03- has no closing bracket"},
      // A batch script that exports them.
      {{{"RANK", "0"}, {"WORLD_SIZE", "4"}}, "RANK=0 and SLURM_PROCID=3 contradict each other"}};
  for (const Case& wrong : cases) {
    const std::string refusal = refusal_of(srun_task_but(wrong.other));
    EXPECT_THAT(refusal, ::testing::HasSubstr(wrong.refusal));
    EXPECT_THAT(refusal, ::testing::ContainsRegex("srun|both or neither|ranks go from|leave RANK|"
                                                  "set MASTER_ADDR"));
  }
}

// One torchrun, or one `zp run`, on each node.
TEST(RendezvousTest, TakesALaunchersRankWithinATaskOfSlurms) {
  const Place place = read_place(srun_task_but({{"RANK", "0"},
                                                {"WORLD_SIZE", "4"},
                                                {"LOCAL_RANK", "0"},
                                                {"LOCAL_WORLD_SIZE", "1"},
                                                {"MASTER_ADDR", "gpu03"},
                                                {"MASTER_PORT", "29500"}}));
  EXPECT_EQ(place.rank, 0);
}

TEST(RendezvousTest, ReadsOpenMpisVariablesOnOneHost) {
  const Place place = read_place(from({{"OMPI_COMM_WORLD_RANK", "1"},
                                       {"OMPI_COMM_WORLD_SIZE", "2"},
                                       {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                                       {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                                       {"PMIX_NAMESPACE", "prterun-1"}}));
  EXPECT_EQ(place.rank, 1);
  EXPECT_EQ(place.master_address, "127.0.0.1");
}

TEST(RendezvousTest, MeetsInAFileWhenTold) {
  const Place place = read_place(
      from({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"ZEROPAGE_RENDEZVOUS", "file:///tmp/meet"}}));
  EXPECT_EQ(place.rendezvous_file, "/tmp/meet");
}

TEST(RendezvousTest, FindsTheFirstHostOfANodeList) {
  EXPECT_EQ(first_host("one"), "one");
  EXPECT_EQ(first_host("one,two"), "one");
  EXPECT_EQ(first_host("node[12-15]"), "node12");
  EXPECT_EQ(first_host("n[001,3]-ib,m4"), "n001-ib");
  EXPECT_EQ(first_host("login,gpu[1-2]"), "login");
}

TEST(RendezvousTest, NamesVariablesThatContradictEachOther) {
  EXPECT_THAT(
      refusal_of(
          from({{"RANK", "2"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "a"}, {"MASTER_PORT", "1"}})),
      ::testing::HasSubstr("RANK=2 and WORLD_SIZE=2 contradict each other"));
  EXPECT_THAT(refusal_of(from({{"RANK", "0"}})), ::testing::HasSubstr("WORLD_SIZE is not"));
  EXPECT_THAT(refusal_of(from({{"WORLD_SIZE", "2"}})), ::testing::HasSubstr("RANK is not"));
  EXPECT_THAT(refusal_of(from({{"RANK", "one"}, {"WORLD_SIZE", "2"}})),
              ::testing::HasSubstr("RANK=one is not a whole number"));
  EXPECT_THAT(refusal_of(from({{"RANK", "0"}, {"WORLD_SIZE", "2"}})),
              ::testing::HasSubstr("needs MASTER_ADDR"));
  EXPECT_THAT(refusal_of(from({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "a"}})),
              ::testing::HasSubstr("needs MASTER_PORT"));
  EXPECT_THAT(
      refusal_of(from(
          {{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "a"}, {"MASTER_PORT", "70000"}})),
      ::testing::HasSubstr("MASTER_PORT=70000"));
  EXPECT_THAT(
      refusal_of(from(
          {{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "3"}, {"LOCAL_WORLD_SIZE", "2"}})),
      ::testing::HasSubstr("impossible"));
  EXPECT_THAT(
      refusal_of(from({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"ZEROPAGE_RENDEZVOUS", "tmp/meet"}})),
      ::testing::HasSubstr("expected file:///absolute/path"));
}

// Where something listens at that port.
std::vector<std::string> addresses_at(uint16_t port) {
  std::vector<std::string> addresses;
  for (const auto& socket : zeropage::testing::listening_sockets()) {
    if (socket.port == port) addresses.push_back(socket.address);
  }
  return addresses;
}

TEST(RendezvousTest, ServesTheStoreAtTheAddressThatTheOthersUse) {
  const detail::PortSocket free = detail::bind_free_port();
  const auto port = static_cast<uint16_t>(free.port);
  const Place place{.world_size = 2, .master_address = "127.0.0.1", .master_port = port};
  ::testing::internal::CaptureStderr();
  const auto store = open_store(place, std::chrono::seconds(10));
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
  EXPECT_THAT(addresses_at(port), ::testing::ElementsAre("0100007F"));
  store->set("a key", std::string("a value"));
}

// What this thread asks the name service goes to a socket that nobody reads.
class SilentNameService {
 public:
  SilentNameService() : socket_(socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t length = sizeof(address);
    EXPECT_EQ(bind(socket_, reinterpret_cast<sockaddr*>(&address), length), 0);
    EXPECT_EQ(getsockname(socket_, reinterpret_cast<sockaddr*>(&address), &length), 0);
    res_init();
    _res.nscount = 1;
    _res.nsaddr_list[0] = address;
  }
  ~SilentNameService() {
    EXPECT_EQ(_res.nscount, 1);
    res_init();
    close(socket_);
  }

 private:
  const int socket_;
};

TEST(RendezvousTest, ANameServiceThatDoesNotAnswerHoldsUpAConnectionForASecond) {
  const detail::PortSocket free = detail::bind_free_port();
  const Place place{.world_size = 2,
                    .master_address = "127.0.0.1",
                    .master_port = static_cast<uint16_t>(free.port)};
  const SilentNameService silent;
  const int seconds = _res.retrans;
  ::testing::internal::CaptureStderr();  // c10d has no name for its messages, and says so
  const auto begin = std::chrono::steady_clock::now();
  const auto store = open_store(place, std::chrono::seconds(60));
  const auto again = detail::connect_again(store);
  // By glibc's default 10 s.
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(4));
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), ::testing::HasSubstr("hostname"));
  EXPECT_EQ(_res.retrans, seconds);
  store->set("a key", std::string("a value"));
  EXPECT_EQ(again->get_to_str("a key"), "a value");
}

TEST(RendezvousTest, ServesAtTheSocketOfTheLauncher) {
  detail::PortSocket given = detail::bind_free_port();
  const auto port = static_cast<uint16_t>(given.port);
  // c10d closes it.
  const int fd = dup(given.socket.get());
  const Place place{
      .world_size = 2, .master_address = "127.0.0.1", .master_port = port, .store_socket = fd};
  const auto store = open_store(place, std::chrono::seconds(10));
  EXPECT_FALSE(detail::is_unused_socket_at(given.socket.get(), port)) << "it is listened at";
  EXPECT_THAT(addresses_at(port), ::testing::ElementsAre("0100007F"));
}

TEST(RendezvousTest, TakesNoOtherSocketForTheLaunchers) {
  const detail::PortSocket bound = detail::bind_free_port();
  const auto port = static_cast<uint16_t>(bound.port);
  EXPECT_TRUE(detail::is_unused_socket_at(bound.socket.get(), port));
  EXPECT_FALSE(detail::is_unused_socket_at(bound.socket.get(), static_cast<uint16_t>(port + 1)));
  EXPECT_FALSE(detail::is_unused_socket_at(STDERR_FILENO, port));
  EXPECT_FALSE(detail::is_unused_socket_at(1'000'000, port));
}

TEST(RendezvousTest, BindsEveryAddressOnlyWhereTheNameIsNotAnAddressOfThisHost) {
  const detail::StoreSocket elsewhere =
      detail::bind_store_socket("192.0.2.1", /*port=*/0, /*one_host=*/false);
  EXPECT_EQ(elsewhere.fd, -1);
  EXPECT_EQ(elsewhere.why_everywhere, "192.0.2.1 is not an address of this host");
  // Like a host's own name on Debian: one word that means loopback here alone.
  const detail::StoreSocket own_name =
      detail::bind_store_socket("0x7f000101", /*port=*/0, /*one_host=*/false);
  EXPECT_EQ(own_name.fd, -1);
  EXPECT_THAT(own_name.why_everywhere, ::testing::HasSubstr("0x7f000101 is 127.0.1.1 here"));
  const detail::StoreSocket alone =
      detail::bind_store_socket("0x7f000101", /*port=*/0, /*one_host=*/true);
  EXPECT_GE(alone.fd, 0);
  close(alone.fd);
}

}  // namespace
}  // namespace zeropage::comm::rendezvous_test
