/* Records what a process does to the files under some directories, for tests of power loss.
 *
 * LD_PRELOAD this into every process that writes there. FOREBAY_POWER_LOG names the log, which all of them append to,
 * FOREBAY_POWER_ROOTS the directories, separated by colons. tests/power/disk.py reads the log and rebuilds what may be
 * on the disk after a power loss at any point of it.
 *
 * The order in the log is what the model rests on:
 *   - a change is logged after it was made and before its caller goes on, so whatever the caller does next is logged
 *     behind it;
 *   - a flush is logged twice, when it begins and when it has succeeded: it makes stable what was logged before it began,
 *     and promises that only once it has ended;
 *   - one record is one write() to a file opened with O_APPEND, so records of several threads and processes never mix.
 * A process that is killed between a change and its record had not gone on: nobody was told of that change.
 *
 * What cannot be recorded (a shared writable mapping, a stdio stream, copies inside the kernel) is logged as "unknown",
 * and the model refuses such a log.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define MAX_FD 65536
#define MAX_IOV 1024
#define MAX_ROOTS 8

/* Kinds of records: tests/power/disk.py has the same numbers. */
enum {
    OPEN = 1, WRITE, TRUNCATE, FALLOCATE, FLUSH_BEGIN, FLUSH_END, RENAME, UNLINK, MKDIR, RMDIR, MARK, UNKNOWN,
};

/* Little-endian, as x86 and arm64 are; followed by `names` bytes of path (or two paths, NUL between) and `data` bytes. */
struct record {
    uint32_t kind, pid;
    uint64_t file;  /* inode number; 0 where a path says all */
    int64_t a, b;   /* open: flags; write: offset; truncate: size; fallocate: offset, length; flush: its number */
    uint32_t mode;  /* fallocate: mode; open: 1 for a directory */
    uint32_t names, data, reserved;
};
_Static_assert(sizeof(struct record) == 48, "disk.py unpacks 48 bytes");

static int log_fd = -1;
static char roots[MAX_ROOTS][PATH_MAX];
static int root_count;
static uint64_t tracked[MAX_FD];    /* fd -> inode number of a file under a root, or 0 */
static unsigned char synced[MAX_FD]; /* fd -> opened with O_DSYNC or O_SYNC */
static uint64_t flushes;

#define REAL(name) \
    static __typeof__(&name) real; \
    if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

static ssize_t real_write(int fd, const void *data, size_t size) {
    REAL(write);
    return real(fd, data, size);
}

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("FOREBAY_POWER_LOG"), *list = getenv("FOREBAY_POWER_ROOTS");
    if (!path || !list) return;
    char copy[MAX_ROOTS * PATH_MAX], *rest = copy, *one;
    snprintf(copy, sizeof copy, "%s", list);
    while ((one = strsep(&rest, ":")) && root_count < MAX_ROOTS)
        snprintf(roots[root_count++], PATH_MAX, "%s", one);
    int (*real_open)(const char *, int, ...) = (int (*)(const char *, int, ...))dlsym(RTLD_NEXT, "open64");
    int fd = real_open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    /* out of the way of numbers that a program expects to get */
    if (fd >= 0) {
        int (*real_fcntl)(int, int, ...) = (int (*)(int, int, ...))dlsym(RTLD_NEXT, "fcntl64");
        log_fd = real_fcntl(fd, F_DUPFD_CLOEXEC, 1000);
        int (*real_close)(int) = (int (*)(int))dlsym(RTLD_NEXT, "close");
        real_close(fd);
    }
    if (log_fd < 0) {
        fprintf(stderr, "recorder: %s cannot be written: %s\n", path, strerror(errno));
        _exit(127);
    }
}

/* ---------------------------------------------------------------------------------------------------- the log */

static void emit(struct record *r, const char *names, const struct iovec *data, int count, size_t limit) {
    if (log_fd < 0) return;
    int saved = errno;
    r->pid = (uint32_t)getpid();
    struct iovec parts[MAX_IOV + 2] = {{r, sizeof *r}, {(void *)names, r->names}};
    int used = 2;
    size_t total = 0;
    for (int i = 0; i < count && total < limit && used < MAX_IOV + 2; i++) {
        size_t take = data[i].iov_len < limit - total ? data[i].iov_len : limit - total;
        parts[used++] = (struct iovec){data[i].iov_base, take};
        total += take;
    }
    r->data = (uint32_t)total;
    ssize_t want = (ssize_t)(sizeof *r + r->names + total);
    static ssize_t (*real)(int, const struct iovec *, int);
    if (!real) real = (ssize_t(*)(int, const struct iovec *, int))dlsym(RTLD_NEXT, "writev");
    if (real(log_fd, parts, used) != want) {
        fprintf(stderr, "recorder: the log is cut short\n");
        _exit(127);
    }
    errno = saved;
}

static void emit_paths(uint32_t kind, uint64_t file, int64_t a, uint32_t mode, const char *one, const char *other) {
    char names[2 * PATH_MAX + 2];
    int length = other ? snprintf(names, sizeof names, "%s%c%s", one, 0, other) : snprintf(names, sizeof names, "%s", one);
    struct record r = {.kind = kind, .file = file, .a = a, .mode = mode, .names = (uint32_t)length};
    emit(&r, names, NULL, 0, 0);
}

static void emit_unknown(const char *what) { emit_paths(UNKNOWN, 0, 0, 0, what, NULL); }

/* For programs that load this: a line of their own in the log. */
void forebay_power_mark(const char *text) { emit_paths(MARK, 0, 0, 0, text, NULL); }

/* ---------------------------------------------------------------------------------------------------- what is tracked */

/* The absolute form of a path, without resolving links; 1 if it lies under a root (or is one). */
static int ours(int dir, const char *path, char *full) {
    if (log_fd < 0 || !path) return 0;
    if (path[0] == '/') {
        snprintf(full, PATH_MAX, "%s", path);
    } else {
        char base[PATH_MAX], link[64];
        if (dir == AT_FDCWD) {
            if (!getcwd(base, sizeof base)) return 0;
        } else {
            snprintf(link, sizeof link, "/proc/self/fd/%d", dir);
            ssize_t n = readlink(link, base, sizeof base - 1);
            if (n <= 0) return 0;
            base[n] = 0;
        }
        if (strlen(base) + strlen(path) + 2 > PATH_MAX) return 0;
        strcpy(full, base);
        strcat(full, "/");
        strcat(full, path);
    }
    /* "//", "/./" and a trailing slash say nothing */
    char *to = full;
    for (const char *from = full; *from; from++) {
        if (from[0] == '/' && (from[1] == '/' || from[1] == 0) && (from[1] || to != full)) continue;
        if (from[0] == '/' && from[1] == '.' && (from[2] == '/' || from[2] == 0)) {
            from++;
            continue;
        }
        *to++ = *from;
    }
    *to = 0;
    for (int i = 0; i < root_count; i++) {
        size_t n = strlen(roots[i]);
        if (!strncmp(full, roots[i], n) && (full[n] == '/' || full[n] == 0)) return 1;
    }
    return 0;
}

/* The inode behind a descriptor if it is tracked. The check costs a call and keeps a number that was closed behind our
 * back (by fclose, say) from being taken for the file that it was. */
static uint64_t file_of(int fd) {
    struct stat st;
    if (fd < 0 || fd >= MAX_FD || !tracked[fd]) return 0;
    if (fstat(fd, &st) || st.st_ino != tracked[fd]) return tracked[fd] = 0;
    return tracked[fd];
}

static int opened(int fd, int dir, const char *path, int flags) {
    char full[PATH_MAX];
    if (fd < 0 || fd >= MAX_FD) return fd;
    tracked[fd] = 0;
    if (!ours(dir, path, full)) return fd;
    int saved = errno;
    struct stat st;
    if (!fstat(fd, &st) && (S_ISREG(st.st_mode) || S_ISDIR(st.st_mode))) {
        if ((flags & O_TMPFILE) == O_TMPFILE) emit_unknown("O_TMPFILE");
        tracked[fd] = st.st_ino;
        synced[fd] = (flags & O_DSYNC) != 0;
        if (S_ISDIR(st.st_mode) || (flags & (O_CREAT | O_TRUNC | O_WRONLY | O_RDWR)))
            emit_paths(OPEN, st.st_ino, flags, S_ISDIR(st.st_mode), full, NULL);
    }
    errno = saved;
    return fd;
}

/* ---------------------------------------------------------------------------------------------------- open and close */

#define OPENER(name) \
    int name(const char *path, int flags, ...) { \
        mode_t mode = 0; \
        if (flags & (O_CREAT | O_TMPFILE)) { va_list rest; va_start(rest, flags); mode = va_arg(rest, mode_t); va_end(rest); } \
        REAL(name); \
        return opened(real(path, flags, mode), AT_FDCWD, path, flags); \
    }
#define OPENER_AT(name) \
    int name(int dir, const char *path, int flags, ...) { \
        mode_t mode = 0; \
        if (flags & (O_CREAT | O_TMPFILE)) { va_list rest; va_start(rest, flags); mode = va_arg(rest, mode_t); va_end(rest); } \
        REAL(name); \
        return opened(real(dir, path, flags, mode), dir, path, flags); \
    }
OPENER(open)
OPENER(open64)
OPENER_AT(openat)
OPENER_AT(openat64)

int creat(const char *path, mode_t mode) { return open(path, O_WRONLY | O_CREAT | O_TRUNC, mode); }
int creat64(const char *path, mode_t mode) { return open64(path, O_WRONLY | O_CREAT | O_TRUNC, mode); }

/* Streams write inside the C library, where nothing can be put in between. */
static void streamed(const char *path, const char *mode) {
    char full[PATH_MAX];
    if (ours(AT_FDCWD, path, full) && strpbrk(mode, "wa+")) emit_unknown("a stdio stream");
}
FILE *fopen(const char *path, const char *mode) {
    REAL(fopen);
    streamed(path, mode);
    return real(path, mode);
}
FILE *fopen64(const char *path, const char *mode) {
    REAL(fopen64);
    streamed(path, mode);
    return real(path, mode);
}

int close(int fd) {
    REAL(close);
    if (fd >= 0 && fd < MAX_FD) tracked[fd] = 0;
    return real(fd);
}

static int copied(int from, int to) {
    if (to >= 0 && to < MAX_FD) {
        tracked[to] = file_of(from);
        synced[to] = from >= 0 && from < MAX_FD && synced[from];
    }
    return to;
}
int dup(int fd) {
    REAL(dup);
    return copied(fd, real(fd));
}
int dup2(int fd, int to) {
    REAL(dup2);
    return copied(fd, real(fd, to));
}
int dup3(int fd, int to, int flags) {
    REAL(dup3);
    return copied(fd, real(fd, to, flags));
}
#define CONTROL(name) \
    int name(int fd, int command, ...) { \
        va_list rest; va_start(rest, command); \
        void *argument = va_arg(rest, void *); \
        va_end(rest); \
        REAL(name); \
        int result = real(fd, command, argument); \
        return command == F_DUPFD || command == F_DUPFD_CLOEXEC ? copied(fd, result) : result; \
    }
CONTROL(fcntl)
CONTROL(fcntl64)

/* ---------------------------------------------------------------------------------------------------- data */

static uint64_t next_flush(void) { return ((uint64_t)getpid() << 32) | __atomic_add_fetch(&flushes, 1, __ATOMIC_SEQ_CST); }

static void emit_flush(uint32_t kind, uint64_t file, uint64_t number) {
    struct record r = {.kind = kind, .file = file, .a = (int64_t)number};
    emit(&r, NULL, NULL, 0, 0);
}

static void emit_synced(int fd, uint64_t file) {
    if (!synced[fd]) return;
    uint64_t number = next_flush();
    emit_flush(FLUSH_BEGIN, file, number);
    emit_flush(FLUSH_END, file, number);
}

static ssize_t wrote(int fd, const struct iovec *data, int count, off_t offset, ssize_t result) {
    uint64_t file;
    if (result <= 0 || !(file = file_of(fd))) return result;
    if (offset < 0) offset = lseek(fd, 0, SEEK_CUR) - result;
    struct record r = {.kind = WRITE, .file = file, .a = offset};
    emit(&r, NULL, data, count, (size_t)result);
    emit_synced(fd, file);
    return result;
}

ssize_t write(int fd, const void *data, size_t size) {
    struct iovec one = {(void *)data, size};
    return wrote(fd, &one, 1, -1, real_write(fd, data, size));
}
ssize_t writev(int fd, const struct iovec *data, int count) {
    REAL(writev);
    return wrote(fd, data, count, -1, real(fd, data, count));
}
#define PWRITE(name, type) \
    ssize_t name(int fd, const void *data, size_t size, type offset) { \
        REAL(name); \
        struct iovec one = {(void *)data, size}; \
        return wrote(fd, &one, 1, offset, real(fd, data, size, offset)); \
    }
PWRITE(pwrite, off_t)
PWRITE(pwrite64, off64_t)
#define PWRITEV(name, type) \
    ssize_t name(int fd, const struct iovec *data, int count, type offset) { \
        REAL(name); \
        return wrote(fd, data, count, offset, real(fd, data, count, offset)); \
    }
PWRITEV(pwritev, off_t)
PWRITEV(pwritev64, off64_t)
#define PWRITEV2(name, type) \
    ssize_t name(int fd, const struct iovec *data, int count, type offset, int flags) { \
        REAL(name); \
        ssize_t result = wrote(fd, data, count, offset, real(fd, data, count, offset, flags)); \
        if (result > 0 && file_of(fd) && (flags & (RWF_DSYNC | RWF_SYNC))) { \
            uint64_t number = next_flush(); \
            emit_flush(FLUSH_BEGIN, file_of(fd), number); \
            emit_flush(FLUSH_END, file_of(fd), number); \
        } \
        return result; \
    }
PWRITEV2(pwritev2, off_t)
PWRITEV2(pwritev64v2, off64_t)

static int truncated(int result, uint64_t file, int64_t size) {
    struct record r = {.kind = TRUNCATE, .file = file, .a = size};
    if (!result && file) emit(&r, NULL, NULL, 0, 0);
    return result;
}
#define FTRUNCATE(name, type) \
    int name(int fd, type size) { \
        REAL(name); \
        return truncated(real(fd, size), file_of(fd), size); \
    }
FTRUNCATE(ftruncate, off_t)
FTRUNCATE(ftruncate64, off64_t)
#define TRUNCATE_PATH(name, type) \
    int name(const char *path, type size) { \
        REAL(name); \
        char full[PATH_MAX]; \
        struct stat st = {0}; \
        int result = real(path, size); \
        return truncated(result, !result && ours(AT_FDCWD, path, full) && !stat(full, &st) ? st.st_ino : 0, size); \
    }
TRUNCATE_PATH(truncate, off_t)
TRUNCATE_PATH(truncate64, off64_t)

static int allocated(int fd, int mode, int64_t offset, int64_t length, int result) {
    uint64_t file = result ? 0 : file_of(fd);
    struct record r = {.kind = FALLOCATE, .file = file, .a = offset, .b = length, .mode = (uint32_t)mode};
    if (file) emit(&r, NULL, NULL, 0, 0);
    return result;
}
#define FALLOCATE_FD(name, type) \
    int name(int fd, int mode, type offset, type length) { \
        REAL(name); \
        return allocated(fd, mode, offset, length, real(fd, mode, offset, length)); \
    }
FALLOCATE_FD(fallocate, off_t)
FALLOCATE_FD(fallocate64, off64_t)
int posix_fallocate(int fd, off_t offset, off_t length) {
    REAL(posix_fallocate);
    return allocated(fd, 0, offset, length, real(fd, offset, length));
}
int posix_fallocate64(int fd, off64_t offset, off64_t length) {
    REAL(posix_fallocate64);
    return allocated(fd, 0, offset, length, real(fd, offset, length));
}

/* ---------------------------------------------------------------------------------------------------- flushes */

static int flush_with(int fd, int (*real)(int)) {
    uint64_t file = file_of(fd), number;
    if (!file) return real(fd);
    emit_flush(FLUSH_BEGIN, file, number = next_flush());
    int result = real(fd);
    if (!result) emit_flush(FLUSH_END, file, number);
    return result;
}
int fsync(int fd) {
    REAL(fsync);
    return flush_with(fd, real);
}
int fdatasync(int fd) {
    REAL(fdatasync);
    return flush_with(fd, real);
}
/* sync_file_range(2) promises nothing after a crash: there is nothing to log. sync() and syncfs() do; nobody here calls
 * them, and as they are not recorded the model is only stricter than the world. */

/* ---------------------------------------------------------------------------------------------------- names */

#define BOTH(dir1, path1, dir2, path2) \
    char one[PATH_MAX], other[PATH_MAX]; \
    int from_ours = ours(dir1, path1, one), to_ours = ours(dir2, path2, other)

static int renamed(int result, int from_ours, const char *one, int to_ours, const char *other) {
    if (!result && from_ours && to_ours) emit_paths(RENAME, 0, 0, 0, one, other);
    else if (!result && (from_ours || to_ours)) emit_unknown("a rename into or out of the roots");
    return result;
}
int rename(const char *from, const char *to) {
    REAL(rename);
    BOTH(AT_FDCWD, from, AT_FDCWD, to);
    return renamed(real(from, to), from_ours, one, to_ours, other);
}
int renameat(int dir1, const char *from, int dir2, const char *to) {
    REAL(renameat);
    BOTH(dir1, from, dir2, to);
    return renamed(real(dir1, from, dir2, to), from_ours, one, to_ours, other);
}
int renameat2(int dir1, const char *from, int dir2, const char *to, unsigned int flags) {
    REAL(renameat2);
    BOTH(dir1, from, dir2, to);
    int result = real(dir1, from, dir2, to, flags);
    if (!result && (flags & ~RENAME_NOREPLACE) && (from_ours || to_ours)) emit_unknown("renameat2 that exchanges");
    return renamed(result, from_ours, one, to_ours, other);
}
static int named(int result, uint32_t kind, int dir, const char *path) {
    char full[PATH_MAX];
    if (!result && ours(dir, path, full)) emit_paths(kind, 0, 0, 0, full, NULL);
    return result;
}
int unlink(const char *path) {
    REAL(unlink);
    return named(real(path), UNLINK, AT_FDCWD, path);
}
int unlinkat(int dir, const char *path, int flags) {
    REAL(unlinkat);
    return named(real(dir, path, flags), flags & AT_REMOVEDIR ? RMDIR : UNLINK, dir, path);
}
int rmdir(const char *path) {
    REAL(rmdir);
    return named(real(path), RMDIR, AT_FDCWD, path);
}
static int made(int result, int dir, const char *path) {
    char full[PATH_MAX];
    struct stat st;
    if (!result && ours(dir, path, full) && !stat(full, &st)) emit_paths(MKDIR, st.st_ino, 0, 0, full, NULL);
    return result;
}
int mkdir(const char *path, mode_t mode) {
    REAL(mkdir);
    return made(real(path, mode), AT_FDCWD, path);
}
int mkdirat(int dir, const char *path, mode_t mode) {
    REAL(mkdirat);
    return made(real(dir, path, mode), dir, path);
}

/* ---------------------------------------------------------------------------------------------------- not modelled */

int link(const char *from, const char *to) {
    REAL(link);
    BOTH(AT_FDCWD, from, AT_FDCWD, to);
    if (from_ours || to_ours) emit_unknown("link");
    return real(from, to);
}
int linkat(int dir1, const char *from, int dir2, const char *to, int flags) {
    REAL(linkat);
    BOTH(dir1, from, dir2, to);
    if (from_ours || to_ours) emit_unknown("linkat");
    return real(dir1, from, dir2, to, flags);
}
#define MAPPER(name, type) \
    void *name(void *at, size_t length, int protection, int flags, int fd, type offset) { \
        REAL(name); \
        if ((flags & MAP_SHARED) && (protection & PROT_WRITE) && file_of(fd)) emit_unknown("a shared writable mapping"); \
        return real(at, length, protection, flags, fd, offset); \
    }
MAPPER(mmap, off_t)
MAPPER(mmap64, off64_t)
ssize_t copy_file_range(int from, off64_t *at, int to, off64_t *to_at, size_t length, unsigned int flags) {
    REAL(copy_file_range);
    if (file_of(to)) emit_unknown("copy_file_range");
    return real(from, at, to, to_at, length, flags);
}
ssize_t sendfile(int to, int from, off_t *at, size_t length);
ssize_t sendfile64(int to, int from, off64_t *at, size_t length);
ssize_t sendfile(int to, int from, off_t *at, size_t length) {
    REAL(sendfile);
    if (file_of(to)) emit_unknown("sendfile");
    return real(to, from, at, length);
}
ssize_t sendfile64(int to, int from, off64_t *at, size_t length) {
    REAL(sendfile64);
    if (file_of(to)) emit_unknown("sendfile64");
    return real(to, from, at, length);
}
