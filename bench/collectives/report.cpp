#include "bench/collectives/report.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <string>

#include <c10/util/StringUtil.h>

#include "memory/bytes.h"

namespace collectives {
namespace {

template <typename... Values>
std::string formatted(const char* format, Values... values) {
  std::array<char, 256> text{};
  std::snprintf(text.data(), text.size(), format, values...);
  return text.data();
}

// Three digits that count: 1.23, 12.3, 123.
std::string three_digits(double value) {
  return formatted(value < 9.995 ? "%.2f" : value < 99.95 ? "%.1f" : "%.0f", value);
}

std::string time_text(double seconds) {
  if (seconds < 1e-3) return three_digits(seconds * 1e6) + " us";
  return three_digits(seconds * 1e3) + " ms";
}

std::string spread_text(const Spread& spread) {
  return c10::str(three_digits(spread.median()), " [", three_digits(spread.least()), " ",
                  three_digits(spread.most()), "]");
}

std::string size_text(const Case& measured) {
  return measured.bytes == 0 ? "" : zeropage::memory::format_bytes(measured.bytes);
}

std::string bandwidth_text(const Measurement& measurement) {
  if (measurement.measured.bytes == 0) return "";
  const double bandwidth = measurement.bandwidth();
  if (bandwidth < 1e9) return three_digits(bandwidth / 1e6) + " MB/s";
  return three_digits(bandwidth / 1e9) + " GB/s";
}

std::string ratio_text(const Measurement& measurement, const std::vector<Measurement>& row,
                       const std::string& other) {
  const Measurement* const reference = find(row, measurement.ranks, measurement.measured, other);
  if (reference == nullptr || reference == &measurement) return "-";
  return spread_text(quotient(measurement.seconds, reference->seconds));
}

void print_line(std::ostream& out, const std::array<std::string, 7>& cells) {
  out << formatted("%-15s %10s  %-7s %10s %12s  %-22s %s\n", cells[0].c_str(), cells[1].c_str(),
                   cells[2].c_str(), cells[3].c_str(), cells[4].c_str(), cells[5].c_str(),
                   cells[6].c_str());
}

void print_finding(std::ostream& out, const Claim& claim, const Finding& finding) {
  const bool times = claim.figure == Claim::Figure::kTimeRatio;
  out << "  " << claim.transport << " / ";
  for (size_t i = 0; i < claim.others.size(); ++i) {
    out << (i == 0 ? "" : " or ") << claim.others[i];
  }
  out << " " << name(finding.measured.operation) << " " << size_text(finding.measured) << ", "
      << finding.ranks << " ranks: " << spread_text(finding.figure) << " x the "
      << (times ? "time" : "bandwidth");
  if (claim.others.size() > 1) {
    out << " of the quicker (";
    for (size_t i = 0; i < claim.others.size(); ++i) {
      out << (i == 0 ? "" : ", ") << claim.others[i] << ": "
          << three_digits(finding.against[i].median());
    }
    out << ")";
  }
  out << ", wanted " << (times ? "<= " : ">= ") << claim.bound << ": "
      << (finding.holds ? "yes" : "no") << "\n";
}

std::string conclusion(const Verdict& verdict) {
  const auto holds = verdict.holds();
  if (!holds) return "not measured, for want of a transport, an operation or a size";
  const auto& findings = verdict.findings;
  const auto kept = std::count_if(findings.begin(), findings.end(),
                                  [](const Finding& finding) { return finding.holds; });
  return c10::str(*holds ? "yes" : "no", ", ", kept, " of ", findings.size());
}

}  // namespace

void print_machine(std::ostream& out, const Machine& machine, const Flags& flags) {
  out << machine.cpu << ", " << machine.cores << " cores, load " << three_digits(machine.load)
      << "; LibTorch " << machine.libtorch << "; " << flags.rounds
      << (flags.rounds == 1 ? " round" : " interleaved rounds")
      << ", median; ratios within a round: median [min max]\n";
}

void print_heading(std::ostream& out, const Run& run) {
  out << "\n" << run.ranks << " ranks\n";
  for (const Absent& absent : run.absent) {
    out << absent.transport << " is absent: " << absent.reason << "\n";
  }
  print_line(
      out, {"operation", "tensor", "over", "time", "bandwidth", "time / gloo's", "time / c10d's"});
  out.flush();
}

void print_row(std::ostream& out, const std::vector<Measurement>& row) {
  for (const Measurement& measurement : row) {
    print_line(out, {name(measurement.measured.operation), size_text(measurement.measured),
                     measurement.transport, time_text(measurement.seconds.median()),
                     bandwidth_text(measurement), ratio_text(measurement, row, "gloo"),
                     ratio_text(measurement, row, "c10d")});
  }
  out.flush();
}

void print_verdicts(std::ostream& out, const std::vector<Verdict>& verdicts) {
  for (const Verdict& verdict : verdicts) {
    out << "\n" << verdict.claim.words() << ": " << conclusion(verdict) << "\n";
    for (const Finding& finding : verdict.findings) print_finding(out, verdict.claim, finding);
  }
  out.flush();
}

}  // namespace collectives
