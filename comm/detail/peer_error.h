// A peer that could not be reached, and why.
#pragma once

#include <stdexcept>
#include <string>

namespace zeropage::comm::detail {

struct PeerError : std::runtime_error {
  PeerError(int peer, const std::string& reason, bool timed_out = false)
      : std::runtime_error(reason), peer(peer), timed_out(timed_out) {}

  // reason: the whole account, which names the peer and says what became of it.
  static PeerError explain(int peer, const std::string& reason, bool timed_out = false) {
    PeerError error(peer, reason, timed_out);
    error.explained = true;
    return error;
  }

  static PeerError of_leave(int peer, const std::string& reason) {
    PeerError error = explain(peer, reason);
    error.left = true;
    return error;
  }

  static PeerError of_abort(int peer) {
    PeerError error(peer, "aborted");
    error.aborted = true;
    return error;
  }

  int peer;
  bool timed_out;
  bool explained = false;
  bool aborted = false;  // by abort(): the peer did nothing wrong
  bool left = false;     // the peer let its world go, in order
};

}  // namespace zeropage::comm::detail
