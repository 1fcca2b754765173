// Files that a program writes at its end, tried before it begins: a run of hours does not end with "cannot be
// written".
//
// Threads: one.
#pragma once

#include <string>
#include <vector>

namespace examples {

struct OutputFile {
  std::string flag;  // for errors: "--json"
  std::string path;  // "": not asked for
};

// Throws where one cannot be opened for writing, or where two are the same file. What is in a file stays, and none is
// left behind that was not there. Where a launcher has started the ranks, rank 0's process alone looks, as it writes.
void check_outputs(const std::vector<OutputFile>& files);

// Replaces what is in the file. Throws where not all of the text got there, as on a full disk.
void write_output(const OutputFile& file, const std::string& text);

}  // namespace examples
