// Loaded before a process's libraries (LD_PRELOAD): its connections to the TCP ports FIRST to LAST go to the ports that
// are SHIFT above, where late_parts.py holds back what passes. LATE_PORTS=FIRST,LAST,SHIFT
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>

typedef int (*connect_fn)(int, const struct sockaddr *, socklen_t);

int connect(int fd, const struct sockaddr *to, socklen_t size) {
  static connect_fn next;
  static int first = 1, last = 0, shift = 0;
  if (next == NULL) {
    const char *ports = getenv("LATE_PORTS");
    if (ports == NULL || sscanf(ports, "%d,%d,%d", &first, &last, &shift) != 3) last = 0;
    next = (connect_fn)dlsym(RTLD_NEXT, "connect");
  }
  if (size < sizeof(struct sockaddr_in) || to->sa_family != AF_INET) return next(fd, to, size);
  struct sockaddr_in moved = *(const struct sockaddr_in *)to;
  const int port = ntohs(moved.sin_port);
  if (port < first || port > last) return next(fd, to, size);
  moved.sin_port = htons((unsigned short)(port + shift));
  return next(fd, (const struct sockaddr *)&moved, sizeof moved);
}
