// What a test and a program that waits before its main() say to each other (warm_program.h, warm_start.cpp), over a SOCK_SEQPACKET
// socket: a request is the arguments, each with its terminating zero, and the descriptor of stdout and stderr. Its reply is an int as
// waitpid() writes it.
#pragma once

#include <cstring>
#include <string>
#include <sys/socket.h>
#include <sys/types.h>

namespace zeropage::testing {

// Names the descriptor of the program's end.
inline constexpr char kWarmSocket[] = "ZEROPAGE_TESTS_WARM_SOCKET";

// Most bytes of a request. A longer one would be cut.
inline constexpr size_t kMostBytes = 64 * 1024;

struct WarmRequest {
  std::string arguments;
  int output = -1;
};

namespace detail {

struct WarmMessage {
  iovec bytes{};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))]{};
  msghdr header{};

  WarmMessage(char* data, size_t size) : bytes{data, size} {
    header.msg_iov = &bytes;
    header.msg_iovlen = 1;
    header.msg_control = control;
    header.msg_controllen = sizeof(control);
  }
};

}  // namespace detail

// False: nobody receives.
inline bool send_request(int socket, WarmRequest request) {
  detail::WarmMessage message(request.arguments.data(), request.arguments.size());
  cmsghdr* const descriptor = CMSG_FIRSTHDR(&message.header);
  descriptor->cmsg_level = SOL_SOCKET;
  descriptor->cmsg_type = SCM_RIGHTS;
  descriptor->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(descriptor), &request.output, sizeof(int));
  return ::sendmsg(socket, &message.header, MSG_NOSIGNAL) ==
         static_cast<ssize_t>(request.arguments.size());
}

// False: nobody sends any more.
inline bool receive_request(int socket, WarmRequest& request) {
  request.arguments.resize(kMostBytes);
  detail::WarmMessage message(request.arguments.data(), request.arguments.size());
  const ssize_t received = ::recvmsg(socket, &message.header, MSG_CMSG_CLOEXEC);
  const cmsghdr* const descriptor = received > 0 ? CMSG_FIRSTHDR(&message.header) : nullptr;
  if (descriptor == nullptr || descriptor->cmsg_type != SCM_RIGHTS) return false;
  request.arguments.resize(static_cast<size_t>(received));
  std::memcpy(&request.output, CMSG_DATA(descriptor), sizeof(int));
  return true;
}

}  // namespace zeropage::testing
