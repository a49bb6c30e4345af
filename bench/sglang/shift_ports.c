// Loaded before a process's libraries (LD_PRELOAD): its connections to the TCP ports FIRST to LAST go to the ports that
// are SHIFT above, where late_parts.py holds back what passes. All three are given to the compiler.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <stddef.h>
#include <sys/socket.h>

typedef int (*connect_fn)(int, const struct sockaddr *, socklen_t);

int connect(int fd, const struct sockaddr *to, socklen_t size) {
  static connect_fn next;
  if (next == NULL) next = (connect_fn)dlsym(RTLD_NEXT, "connect");
  if (size < sizeof(struct sockaddr_in) || to->sa_family != AF_INET) return next(fd, to, size);
  struct sockaddr_in moved = *(const struct sockaddr_in *)to;
  const int port = ntohs(moved.sin_port);
  if (port < FIRST || port > LAST) return next(fd, to, size);
  moved.sin_port = htons((unsigned short)(port + SHIFT));
  return next(fd, (const struct sockaddr *)&moved, sizeof moved);
}
