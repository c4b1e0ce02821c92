/* Ends a process, or fills its disk, at a chosen change of the files of a folder.

   cc -shared -fPIC -o shim.so shim.c -ldl

   Preloaded, it counts the calls that change files under a folder: writes, syncs, and
   files and folders that are made, renamed and removed. fault_arm(folder, log, at, mode,
   kind) begins; with a log, each call is written to it. At call number `at` of those that
   the regular expression `kind` describes (all, without one), mode 1 kills the process,
   after half of the bytes of a write; in mode 2, this call and all after it that need
   space fail as on a full disk. In mode 3 nothing is disturbed, and at each call the
   folder is copied to log.d/NUMBER, as a kill would leave it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <regex.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static char folder[PATH_MAX], copies[PATH_MAX];
static _Thread_local long number;
static int log_fd = -1, mode;
static long at;
static atomic_long calls, matches;
static regex_t wanted;
static int chooses;

#define NEXT(name) \
  static __typeof__(name) *next; \
  if (!next) next = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

static ssize_t plain_write(int fd, const void *data, size_t size) {
  NEXT(write);
  return next(fd, data, size);
}

void fault_arm(const char *path, const char *log, long call, int how, const char *kind) {
  atomic_store(&calls, 0);
  atomic_store(&matches, 0);
  chooses = kind && !regcomp(&wanted, kind, REG_EXTENDED | REG_NOSUB);
  at = call;
  mode = how;
  if (log) log_fd = open(log, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (how == 3) {
    snprintf(copies, sizeof copies, "%s.d", log);
    mkdir(copies, 0755);
  }
  snprintf(folder, sizeof folder, "%s", path);
}

static void die(void) {
  if (mode == 3) {
    char command[3 * PATH_MAX];
    snprintf(command, sizeof command, "cp -r '%s' '%s/%ld'", folder, copies, number);
    if (system(command)) fprintf(stderr, "cannot copy %s\n", folder);
    return;
  }
  kill(getpid(), SIGKILL);
  for (;;) pause();
}

/* What becomes of a call: 0 goes on, 1 is killed now, 2 fails. */
static int fate(const char *name, const char *path, int needs_space) {
  size_t size = strlen(folder);
  if (!size || strncmp(path, folder, size) || (path[size] && path[size] != '/')) return 0;
  long call = atomic_fetch_add(&calls, 1);
  char line[PATH_MAX + 64];
  int length = snprintf(line, sizeof line, "%ld %s %s\n", call, name, path);
  if (log_fd >= 0) plain_write(log_fd, line, length);
  number = call;
  if (chooses) {
    line[length - 1] = 0;
    if (regexec(&wanted, line, 0, NULL, 0)) return 0;
    call = atomic_fetch_add(&matches, 1);
  }
  if (mode == 3 && !access(folder, F_OK)) return 1;
  if (mode == 1 && call == at) return 1;
  if (mode == 2 && at >= 0 && call >= at && needs_space) return 2;
  return 0;
}

static int fate_of_file(const char *name, int fd, int needs_space) {
  if (!folder[0]) return 0;
  char link[64], path[PATH_MAX];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t size = readlink(link, path, sizeof path - 1);
  if (size < 0) return 0;
  path[size] = 0;
  return fate(name, path, needs_space);
}

static const char *absolute(int dir, const char *path, char *buffer) {
  if (path[0] == '/') return path;
  char link[64], base[PATH_MAX];
  snprintf(link, sizeof link, "/proc/self/fd/%d", dir);
  ssize_t size = dir == AT_FDCWD ? readlink("/proc/self/cwd", base, sizeof base - 1)
                                 : readlink(link, base, sizeof base - 1);
  if (size < 0) return path;
  base[size] = 0;
  snprintf(buffer, PATH_MAX, "%.2000s/%.2000s", base, path);
  return buffer;
}

#define FULL(result) do { errno = ENOSPC; return result; } while (0)

ssize_t write(int fd, const void *data, size_t size) {
  int end = fate_of_file("write", fd, 1);
  ssize_t done = 0;
  if (end == 1) { done = plain_write(fd, data, size / 2); die(); }
  if (end == 2) FULL(-1);
  ssize_t rest = plain_write(fd, (const char *)data + done, size - done);
  return rest < 0 ? rest : done + rest;
}

#define WRITE_AT(name, offset_type) \
  ssize_t name(int fd, const void *data, size_t size, offset_type offset) { \
    NEXT(name); \
    int end = fate_of_file("write", fd, 1); \
    ssize_t done = 0; \
    if (end == 1) { done = next(fd, data, size / 2, offset); die(); } \
    if (end == 2) FULL(-1); \
    ssize_t rest = next(fd, (const char *)data + done, size - done, offset + done); \
    return rest < 0 ? rest : done + rest; \
  }
WRITE_AT(pwrite, off_t)
WRITE_AT(pwrite64, off64_t)

ssize_t writev(int fd, const struct iovec *parts, int count) {
  NEXT(writev);
  int end = fate_of_file("write", fd, 1);
  if (end == 1) die();
  if (end == 2) FULL(-1);
  return next(fd, parts, count);
}

#define OPEN(name, get) \
  int name(const char *path, int flags, ...) { \
    NEXT(name); \
    int permissions = 0; \
    if (flags & (O_CREAT | O_TMPFILE)) { \
      va_list rest; va_start(rest, flags); permissions = va_arg(rest, int); va_end(rest); \
    } \
    if (flags & (O_CREAT | O_TRUNC)) { \
      char buffer[PATH_MAX]; \
      int end = fate("open", absolute(AT_FDCWD, path, buffer), 1); \
      if (end == 1) die(); \
      if (end == 2) FULL(-1); \
    } \
    return next(path, flags, permissions); \
  }
OPEN(open, 0)
OPEN(open64, 0)

#define OPENAT(name) \
  int name(int dir, const char *path, int flags, ...) { \
    NEXT(name); \
    int permissions = 0; \
    if (flags & (O_CREAT | O_TMPFILE)) { \
      va_list rest; va_start(rest, flags); permissions = va_arg(rest, int); va_end(rest); \
    } \
    if (flags & (O_CREAT | O_TRUNC)) { \
      char buffer[PATH_MAX]; \
      int end = fate("open", absolute(dir, path, buffer), 1); \
      if (end == 1) die(); \
      if (end == 2) FULL(-1); \
    } \
    return next(dir, path, flags, permissions); \
  }
OPENAT(openat)
OPENAT(openat64)

#define ON_FILE(name) \
  int name(int fd) { \
    NEXT(name); \
    if (fate_of_file("sync", fd, 0) == 1) die(); \
    return next(fd); \
  }
ON_FILE(fsync)
ON_FILE(fdatasync)

int rename(const char *from, const char *to) {
  NEXT(rename);
  char buffer[PATH_MAX];
  if (fate("rename", absolute(AT_FDCWD, to, buffer), 0) == 1) die();
  return next(from, to);
}

int renameat(int a, const char *from, int b, const char *to) {
  NEXT(renameat);
  char buffer[PATH_MAX];
  if (fate("rename", absolute(b, to, buffer), 0) == 1) die();
  return next(a, from, b, to);
}

int mkdir(const char *path, mode_t permissions) {
  NEXT(mkdir);
  char buffer[PATH_MAX];
  int end = fate("mkdir", absolute(AT_FDCWD, path, buffer), 1);
  if (end == 1) die();
  if (end == 2) FULL(-1);
  return next(path, permissions);
}

int link(const char *from, const char *to) {
  NEXT(link);
  char buffer[PATH_MAX];
  int end = fate("link", absolute(AT_FDCWD, to, buffer), 1);
  if (end == 1) die();
  if (end == 2) FULL(-1);
  return next(from, to);
}

#define REMOVE(name) \
  int name(const char *path) { \
    NEXT(name); \
    char buffer[PATH_MAX]; \
    if (fate("remove", absolute(AT_FDCWD, path, buffer), 0) == 1) die(); \
    return next(path); \
  }
REMOVE(unlink)
REMOVE(rmdir)

int unlinkat(int dir, const char *path, int flags) {
  NEXT(unlinkat);
  char buffer[PATH_MAX];
  if (fate("remove", absolute(dir, path, buffer), 0) == 1) die();
  return next(dir, path, flags);
}
