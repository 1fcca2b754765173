// The tour of the operations, and that its page shows what it prints.
#include <sstream>

#include "tests/examples/train_gpt_run.h"

namespace zeropage::collectives_tour_test {
namespace {

using namespace zeropage::testing;
using ::testing::HasSubstr;

std::string page() {
  std::ostringstream text;
  text << std::ifstream(EXAMPLES_FOLDER "/collectives_tour/README.md").rdbuf();
  return text.str();
}

TEST(CollectivesTourTest, EveryOperationWorksOnTheHostAndThePageShowsWhatIsPrinted) {
  const Outcome tour = shell(COLLECTIVES_TOUR);
  EXPECT_EQ(tour.exit_code, 0) << tour.output;
  const size_t table = tour.output.find("tensors on");
  ASSERT_NE(table, std::string::npos) << tour.output;
  const std::string values = tour.output.substr(0, tour.output.rfind("\n\n", table) + 1);
  ASSERT_GT(values.size(), 500U);
  EXPECT_THAT(page(), HasSubstr("```text\n" + values + "```\n"));

  // What works on the host, which is the same on every machine: the first three columns.
  std::istringstream lines(tour.output.substr(table));
  int rows = 0;
  for (std::string line; std::getline(lines, line) && !line.empty(); ++rows) {
    const std::string on_host = line.substr(0, 16 + 3 * 14);
    EXPECT_THAT(page(), HasSubstr(on_host.substr(0, on_host.find_last_not_of(' ') + 1)));
    EXPECT_TRUE(rows == 0 || on_host.find('-') == std::string::npos) << line;
  }
  EXPECT_EQ(rows, 11) << "the devices, and ten operations";
}

TEST(CollectivesTourTest, HoldsAtOtherNumbersOfRanks) {
  for (const char* ranks : {"2", "3"}) {
    const Outcome tour = shell(std::string(COLLECTIVES_TOUR) + " --ranks " + ranks);
    EXPECT_EQ(tour.exit_code, 0) << tour.output;
  }
}

}  // namespace
}  // namespace zeropage::collectives_tour_test
