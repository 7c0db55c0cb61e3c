/* A file system that lacks something or fails, below one folder: put before libc by LD_PRELOAD.

   ODD_ROOT   the folder, without symbolic links
   ODD_LACKS  words: dirsync (fsync of a folder is EINVAL), locks (ENOSYS), exchange (EINVAL),
              case (names are stored in lower case), local (statfs says FUSE), links (a second
              name is EPERM), clones (FICLONE is EOPNOTSUPP; else it copies)
   ODD_NAMES  the longest name, in bytes
   ODD_FAILS  call:errno:n, the call fails from its n-th time on; call is one of write, fsync,
              close, rename, unlink, mkdir, create, link */
#define _GNU_SOURCE
#include <ctype.h>
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/uio.h>
#include <unistd.h>

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static const char *setting(const char *name) {
  const char *value = getenv(name);
  return value ? value : "";
}

static int lacks(const char *what) { return strstr(setting("ODD_LACKS"), what) != NULL; }

static int fd_below(int fd);

/* Whether a path is below the root; one through a descriptor counts by the folder that this is. */
static int below(const char *path) {
  int fd, end = 0;
  if (path && sscanf(path, "/proc/self/fd/%d/%n", &fd, &end) == 1 && end) return fd_below(fd);
  const char *root = setting("ODD_ROOT");
  size_t length = strlen(root);
  return length && path && !strncmp(path, root, length) && (path[length] == '/' || !path[length]);
}

static int fd_below(int fd) {
  char link[64], path[PATH_MAX + 1];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t length = readlink(link, path, PATH_MAX);
  if (length < 0) return 0;
  path[length] = 0;
  return below(path);
}

static int is_folder(int fd) {
  struct stat status;
  return fstat(fd, &status) == 0 && S_ISDIR(status.st_mode);
}

static atomic_long counted;

/* Whether this call is to fail; sets errno. */
static int fails(const char *call) {
  char wanted[32];
  int code, from;
  if (sscanf(setting("ODD_FAILS"), "%31[^:]:%d:%d", wanted, &code, &from) != 3) return 0;
  if (strcmp(wanted, call) || atomic_fetch_add(&counted, 1) + 1 < from) return 0;
  errno = code;
  return 1;
}

/* The path as it is stored, in a buffer; NULL, with errno, if a name in it is too long. */
static const char *stored(const char *path, char *buffer) {
  if (!below(path)) return path;
  size_t longest = atoi(setting("ODD_NAMES")), name = 0, root = strlen(setting("ODD_ROOT"));
  int lower = lacks("case");
  size_t at = 0;
  for (; path[at] && at < PATH_MAX; at++) {
    name = path[at] == '/' ? 0 : name + 1;
    if (longest && at > root && name > longest) {
      errno = ENAMETOOLONG;
      return NULL;
    }
    buffer[at] = lower && at > root ? tolower(path[at]) : path[at];
  }
  buffer[at] = 0;
  return buffer;
}

#define PATH(path, wrong) \
  char buffer_##path[PATH_MAX + 1]; \
  path = stored(path, buffer_##path); \
  if (!path) return wrong

#define OPEN(name) \
  int name(const char *path, int flags, ...) { \
    va_list rest; \
    va_start(rest, flags); \
    mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
    va_end(rest); \
    if (flags & O_CREAT && below(path) && fails("create")) return -1; \
    PATH(path, -1); \
    return NEXT(name)(path, flags, mode); \
  }
OPEN(open)
OPEN(open64)

#define OPENAT(name) \
  int name(int folder, const char *path, int flags, ...) { \
    va_list rest; \
    va_start(rest, flags); \
    mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
    va_end(rest); \
    if (flags & O_CREAT && below(path) && fails("create")) return -1; \
    PATH(path, -1); \
    return NEXT(name)(folder, path, flags, mode); \
  }
OPENAT(openat)
OPENAT(openat64)

FILE *fopen(const char *path, const char *mode) {
  PATH(path, NULL);
  return NEXT(fopen)(path, mode);
}
FILE *fopen64(const char *path, const char *mode) {
  PATH(path, NULL);
  return NEXT(fopen64)(path, mode);
}
DIR *opendir(const char *path) {
  PATH(path, NULL);
  return NEXT(opendir)(path);
}
int mkdir(const char *path, mode_t mode) {
  if (below(path) && fails("mkdir")) return -1;
  PATH(path, -1);
  return NEXT(mkdir)(path, mode);
}
int rmdir(const char *path) {
  PATH(path, -1);
  return NEXT(rmdir)(path);
}
int unlink(const char *path) {
  if (below(path) && fails("unlink")) return -1;
  PATH(path, -1);
  return NEXT(unlink)(path);
}
int unlinkat(int folder, const char *path, int flags) {
  if ((below(path) || (folder >= 0 && fd_below(folder))) && fails("unlink")) return -1;
  PATH(path, -1);
  return NEXT(unlinkat)(folder, path, flags);
}
int access(const char *path, int mode) {
  PATH(path, -1);
  return NEXT(access)(path, mode);
}
int chmod(const char *path, mode_t mode) {
  PATH(path, -1);
  return NEXT(chmod)(path, mode);
}
int symlink(const char *target, const char *path) {
  PATH(path, -1);
  return NEXT(symlink)(target, path);
}
ssize_t readlink(const char *path, char *into, size_t size) {
  PATH(path, -1);
  return NEXT(readlink)(path, into, size);
}

#define STAT(name, type) \
  int name(const char *path, struct type *status) { \
    PATH(path, -1); \
    return NEXT(name)(path, status); \
  }
STAT(stat, stat)
STAT(lstat, stat)
STAT(stat64, stat64)
STAT(lstat64, stat64)

#define XSTAT(name, type) \
  int name(int version, const char *path, struct type *status) { \
    PATH(path, -1); \
    return ((int (*)(int, const char *, struct type *))dlsym(RTLD_NEXT, #name))( \
        version, path, status); \
  }
XSTAT(__xstat, stat)
XSTAT(__lxstat, stat)
XSTAT(__xstat64, stat64)
XSTAT(__lxstat64, stat64)

#define STATAT(name, type) \
  int name(int folder, const char *path, struct type *status, int flags) { \
    PATH(path, -1); \
    return NEXT(name)(folder, path, status, flags); \
  }
STATAT(fstatat, stat)
STATAT(fstatat64, stat64)

int rename(const char *from, const char *to) {
  if (below(to) && fails("rename")) return -1;
  PATH(from, -1);
  PATH(to, -1);
  return NEXT(rename)(from, to);
}
int renameat(int one, const char *from, int other, const char *to) {
  if (below(to) && fails("rename")) return -1;
  PATH(from, -1);
  PATH(to, -1);
  return NEXT(renameat)(one, from, other, to);
}
int renameat2(int one, const char *from, int other, const char *to, unsigned int flags) {
  if (below(to) && flags && lacks("exchange")) {
    errno = EINVAL;
    return -1;
  }
  if (below(to) && fails("rename")) return -1;
  PATH(from, -1);
  PATH(to, -1);
  return NEXT(renameat2)(one, from, other, to, flags);
}
/* Whether a second name is refused; a file without any (O_TMPFILE) may get its first. */
static int links_refused(const char *from, const char *to) {
  if (!lacks("links") || !below(to) || !*from || !strncmp(from, "/proc/", 6)) return 0;
  errno = EPERM;
  return 1;
}
int link(const char *from, const char *to) {
  if (links_refused(from, to) || (below(to) && fails("link"))) return -1;
  PATH(from, -1);
  PATH(to, -1);
  return NEXT(link)(from, to);
}
int linkat(int one, const char *from, int other, const char *to, int flags) {
  if (links_refused(from, to) || (below(to) && fails("link"))) return -1;
  PATH(from, -1);
  PATH(to, -1);
  return NEXT(linkat)(one, from, other, to, flags);
}

int ioctl(int fd, unsigned long request, ...) {
  va_list rest;
  va_start(rest, request);
  void *argument = va_arg(rest, void *);
  va_end(rest);
  if (request != 0x40049409 || !fd_below(fd)) return NEXT(ioctl)(fd, request, argument);
  if (lacks("clones")) {
    errno = EOPNOTSUPP;
    return -1;
  }
  char block[65536];
  off_t at = 0;
  for (ssize_t size; (size = pread((int)(long)argument, block, sizeof block, at)); at += size)
    if (size < 0 || pwrite(fd, block, size, at) != size) return -1;
  return 0;
}

static char unsynced[1 << 16];
/* Descriptors that were written to since they were opened or synced. */
static char *mark(int fd) { return &unsynced[fd & 0xffff]; }

int fsync(int fd) {
  if (fd_below(fd)) {
    if (lacks("dirsync") && is_folder(fd)) {
      errno = EINVAL;
      return -1;
    }
    if (fails("fsync")) return -1;
  }
  *mark(fd) = 0;
  return NEXT(fsync)(fd);
}
int fdatasync(int fd) {
  if (fd_below(fd) && fails("fsync")) return -1;
  *mark(fd) = 0;
  return NEXT(fdatasync)(fd);
}
/* Of what was written and not synced; it is closed all the same, as on NFS. */
int close(int fd) {
  int wrong = 0;
  if (fd > 2 && *setting("ODD_FAILS") && *mark(fd) && fd_below(fd) && fails("close")) wrong = errno;
  if (fd > 2) *mark(fd) = 0;
  int done = NEXT(close)(fd);
  if (!wrong) return done;
  errno = wrong;
  return -1;
}

int syncfs(int fd) {
  if (fd_below(fd) && fails("fsync")) return -1;
  return NEXT(syncfs)(fd);
}

int flock(int fd, int how) {
  if (lacks("locks") && fd_below(fd)) {
    errno = ENOSYS;
    return -1;
  }
  return NEXT(flock)(fd, how);
}

static int locking(int command) {
  return command == F_SETLK || command == F_SETLKW || command == F_OFD_SETLK ||
         command == F_OFD_SETLKW;
}
#define FCNTL(name) \
  int name(int fd, int command, ...) { \
    va_list rest; \
    va_start(rest, command); \
    void *argument = va_arg(rest, void *); \
    va_end(rest); \
    if (locking(command) && lacks("locks") && fd_below(fd)) { \
      errno = ENOSYS; \
      return -1; \
    } \
    return NEXT(name)(fd, command, argument); \
  }
FCNTL(fcntl)
FCNTL(fcntl64)

#define WRITES(name, result, parameters, arguments) \
  result name parameters { \
    if (fd > 2 && *setting("ODD_FAILS") && fd_below(fd) && fails("write")) return -1; \
    if (fd > 2 && *setting("ODD_FAILS")) *mark(fd) = 1; \
    return NEXT(name) arguments; \
  }
WRITES(write, ssize_t, (int fd, const void *from, size_t size), (fd, from, size))
WRITES(pwrite, ssize_t, (int fd, const void *from, size_t size, off_t at), (fd, from, size, at))
WRITES(pwrite64, ssize_t, (int fd, const void *from, size_t size, off64_t at), (fd, from, size, at))
WRITES(writev, ssize_t, (int fd, const struct iovec *from, int count), (fd, from, count))
WRITES(pwritev, ssize_t, (int fd, const struct iovec *from, int count, off_t at), (fd, from, count, at))

long pathconf(const char *path, int name) {
  if (name == _PC_NAME_MAX && below(path) && *setting("ODD_NAMES")) return atoi(setting("ODD_NAMES"));
  PATH(path, -1);
  return NEXT(pathconf)(path, name);
}
#define STATFS(name, type) \
  int name(const char *path, struct type *status) { \
    int odd = lacks("local") && below(path); \
    PATH(path, -1); \
    int outcome = NEXT(name)(path, status); \
    if (!outcome && odd) status->f_type = 0x65735546; \
    return outcome; \
  }
STATFS(statfs, statfs)
STATFS(statfs64, statfs64)

/* Count the calls that may fail from the beginning again. */
void odd_reset(void) { atomic_store(&counted, 0); }
