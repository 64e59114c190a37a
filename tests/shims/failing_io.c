/* Errors of drives, on demand: an LD_PRELOAD shim that makes chosen system calls on chosen paths fail.
 *
 * FOREBAY_FAILING_IO names a file that this maps and tests/disks/faults.py writes: a table of rules, shared by every
 * process that runs under the shim and changed while they run. A call that a rule is for fails with the rule's errno and
 * does nothing, from the call `after` on, for `times` calls (0: until the rule is taken away).
 */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum {
    OPEN = 1,      /* open and its kin, of files that are there */
    CREATE = 2,    /* the same with O_CREAT; mkdir, rename, link, unlink */
    READ = 4,
    WRITE = 8,
    SYNC = 16,     /* fsync, fdatasync */
    ALLOCATE = 32, /* fallocate, ftruncate */
    STAT = 64,
};

#define RULES 16

struct rule {
    uint32_t active;
    uint32_t operations;
    int32_t error;
    uint32_t after;
    uint32_t times;
    uint32_t seen; /* calls that it was for */
    uint32_t failed;
    char pattern[484]; /* of fnmatch(3), against the whole path */
};

_Static_assert(sizeof(struct rule) == 512, "as tests/disks/faults.py has it");

static struct rule *rules;
static const char proc_fd[] = "/proc/self/fd/%d";

#define REAL(name) (__typeof__(&name))dlsym(RTLD_NEXT, #name)
#define ORIGINAL(name) \
    static __typeof__(&name) original; \
    if (!original) original = REAL(name)

__attribute__((constructor)) static void map_rules(void)
{
    const char *path = getenv("FOREBAY_FAILING_IO");
    if (!path) return;
    int fd = (REAL(open))(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return;
    void *found = mmap(NULL, RULES * sizeof(struct rule), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (found != MAP_FAILED) rules = found;
}

static int wanted(uint32_t operation)
{
    for (int i = 0; rules && i < RULES; i++)
        if (__atomic_load_n(&rules[i].active, __ATOMIC_ACQUIRE) && rules[i].operations & operation) return 1;
    return 0;
}

/* 1, with errno set, if this call is to fail. */
static int fails(uint32_t operation, const char *path)
{
    for (int i = 0; i < RULES; i++) {
        struct rule *rule = &rules[i];
        if (!__atomic_load_n(&rule->active, __ATOMIC_ACQUIRE) || !(rule->operations & operation)) continue;
        if (fnmatch(rule->pattern, path, 0)) continue;
        uint32_t number = __atomic_fetch_add(&rule->seen, 1, __ATOMIC_ACQ_REL);
        if (number < rule->after || (rule->times && number >= rule->after + rule->times)) continue;
        __atomic_fetch_add(&rule->failed, 1, __ATOMIC_ACQ_REL);
        errno = rule->error;
        return 1;
    }
    return 0;
}

static int path_fails(uint32_t operation, int folder, const char *path)
{
    char whole[8192], base[4096];
    if (!path || !wanted(operation)) return 0;
    if (path[0] == '/') return fails(operation, path);
    if (folder == AT_FDCWD) {
        if (!getcwd(base, sizeof base)) return 0;
    } else {
        char link[64];
        snprintf(link, sizeof link, proc_fd, folder);
        ssize_t length = readlink(link, base, sizeof base - 1);
        if (length < 0) return 0;
        base[length] = 0;
    }
    snprintf(whole, sizeof whole, "%s/%s", base, path);
    return fails(operation, whole);
}

static int fd_fails(uint32_t operation, int fd)
{
    char link[64], path[4096];
    if (!wanted(operation)) return 0;
    int before = errno;
    snprintf(link, sizeof link, proc_fd, fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    errno = before;
    if (length < 0 || path[0] != '/') return 0;
    path[length] = 0;
    return fails(operation, path);
}

static uint32_t opening(int flags) { return flags & O_CREAT ? CREATE | OPEN : OPEN; }

/* The argument behind flags, which is there only where a file may be made. */
#define TAKE_MODE(flags) \
    mode_t mode = 0; \
    if (flags & (O_CREAT | O_TMPFILE)) { \
        va_list rest; \
        va_start(rest, flags); \
        mode = va_arg(rest, mode_t); \
        va_end(rest); \
    }

#define OPENS(name) \
    int name(const char *path, int flags, ...) \
    { \
        ORIGINAL(name); \
        TAKE_MODE(flags) \
        return path_fails(opening(flags), AT_FDCWD, path) ? -1 : original(path, flags, mode); \
    }
#define OPENS_AT(name) \
    int name(int folder, const char *path, int flags, ...) \
    { \
        ORIGINAL(name); \
        TAKE_MODE(flags) \
        return path_fails(opening(flags), folder, path) ? -1 : original(folder, path, flags, mode); \
    }
OPENS(open)
OPENS(open64)
OPENS_AT(openat)
OPENS_AT(openat64)

#define STREAMS(name) \
    FILE *name(const char *path, const char *mode) \
    { \
        ORIGINAL(name); \
        return path_fails(mode[0] == 'r' ? OPEN : CREATE | OPEN, AT_FDCWD, path) ? NULL : original(path, mode); \
    }
STREAMS(fopen)
STREAMS(fopen64)

/* Whatever has a file descriptor first. */
#define ON_FD(result, name, operation, parameters, arguments) \
    result name parameters \
    { \
        ORIGINAL(name); \
        return fd_fails(operation, fd) ? -1 : original arguments; \
    }
ON_FD(ssize_t, read, READ, (int fd, void *data, size_t size), (fd, data, size))
ON_FD(ssize_t, pread, READ, (int fd, void *data, size_t size, off_t at), (fd, data, size, at))
ON_FD(ssize_t, pread64, READ, (int fd, void *data, size_t size, off64_t at), (fd, data, size, at))
ON_FD(ssize_t, readv, READ, (int fd, const struct iovec *parts, int count), (fd, parts, count))
ON_FD(ssize_t, preadv, READ, (int fd, const struct iovec *parts, int count, off_t at), (fd, parts, count, at))
ON_FD(ssize_t, preadv64, READ, (int fd, const struct iovec *parts, int count, off64_t at), (fd, parts, count, at))
ON_FD(ssize_t, preadv2, READ, (int fd, const struct iovec *parts, int count, off_t at, int flags),
      (fd, parts, count, at, flags))
ON_FD(ssize_t, preadv64v2, READ, (int fd, const struct iovec *parts, int count, off64_t at, int flags),
      (fd, parts, count, at, flags))
ON_FD(ssize_t, write, WRITE, (int fd, const void *data, size_t size), (fd, data, size))
ON_FD(ssize_t, pwrite, WRITE, (int fd, const void *data, size_t size, off_t at), (fd, data, size, at))
ON_FD(ssize_t, pwrite64, WRITE, (int fd, const void *data, size_t size, off64_t at), (fd, data, size, at))
ON_FD(ssize_t, writev, WRITE, (int fd, const struct iovec *parts, int count), (fd, parts, count))
ON_FD(ssize_t, pwritev, WRITE, (int fd, const struct iovec *parts, int count, off_t at), (fd, parts, count, at))
ON_FD(ssize_t, pwritev64, WRITE, (int fd, const struct iovec *parts, int count, off64_t at), (fd, parts, count, at))
ON_FD(int, fsync, SYNC, (int fd), (fd))
ON_FD(int, fdatasync, SYNC, (int fd), (fd))
ON_FD(int, fallocate, ALLOCATE, (int fd, int mode, off_t at, off_t size), (fd, mode, at, size))
ON_FD(int, fallocate64, ALLOCATE, (int fd, int mode, off64_t at, off64_t size), (fd, mode, at, size))
ON_FD(int, ftruncate, ALLOCATE, (int fd, off_t size), (fd, size))
ON_FD(int, ftruncate64, ALLOCATE, (int fd, off64_t size), (fd, size))
ON_FD(int, fstatvfs, STAT, (int fd, struct statvfs *found), (fd, found))

/* Whatever has a path first. */
#define ON_PATH(name, operation, parameters, arguments) \
    int name parameters \
    { \
        ORIGINAL(name); \
        return path_fails(operation, AT_FDCWD, path) ? -1 : original arguments; \
    }
ON_PATH(mkdir, CREATE, (const char *path, mode_t mode), (path, mode))
ON_PATH(unlink, CREATE, (const char *path), (path))
ON_PATH(rename, CREATE, (const char *path, const char *name), (path, name))
ON_PATH(link, CREATE, (const char *path, const char *name), (path, name))
ON_PATH(statvfs, STAT, (const char *path, struct statvfs *found), (path, found))
ON_PATH(stat, STAT, (const char *path, struct stat *found), (path, found))
ON_PATH(stat64, STAT, (const char *path, struct stat64 *found), (path, found))
ON_PATH(lstat, STAT, (const char *path, struct stat *found), (path, found))
