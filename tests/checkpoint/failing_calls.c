// LD_PRELOAD: one of the calls on files below $FS_ROOT fails, or writes and reads less than it was asked to.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static int number, failure, first_failing;  // calls so far; the errno, 0: a short write or read

void fs_arm(int call, int error) { number = 0, first_failing = call, failure = error; }
int fs_calls(void) { return number; }

static int is_below(const char *path) {
    const char *root = getenv("FS_ROOT");
    return root && path && !strncmp(path, root, strlen(root));
}

static int is_descriptor_below(int descriptor) {
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (size < 0) return 0;
    path[size] = 0;
    return is_below(path);
}

static int fails(int is_there) { return is_there && __atomic_add_fetch(&number, 1, __ATOMIC_SEQ_CST) == first_failing; }

#define REAL(type, name, ...) static type (*real)(__VA_ARGS__); if (!real) real = dlsym(RTLD_NEXT, #name)
#define FAIL_IF(there) if (fails(there) && failure) { errno = failure; return -1; }
#define SHORTENED(there) if (fails(there)) { if (failure) { errno = failure; return -1; } size = size > 1 ? size / 2 : size; }

ssize_t write(int d, const void *b, size_t size) { REAL(ssize_t, write, int, const void *, size_t); SHORTENED(is_descriptor_below(d)) return real(d, b, size); }
ssize_t read(int d, void *b, size_t size) { REAL(ssize_t, read, int, void *, size_t); SHORTENED(is_descriptor_below(d)) return real(d, b, size); }
int fsync(int d) { REAL(int, fsync, int); FAIL_IF(is_descriptor_below(d)) return real(d); }
int rename(const char *a, const char *b) { REAL(int, rename, const char *, const char *); FAIL_IF(is_below(b)) return real(a, b); }
int mkdir(const char *p, mode_t m) { REAL(int, mkdir, const char *, mode_t); FAIL_IF(is_below(p)) return real(p, m); }
int unlink(const char *p) { REAL(int, unlink, const char *); FAIL_IF(is_below(p)) return real(p); }
int open64(const char *p, int f, ...) {
    va_list rest; va_start(rest, f); mode_t m = va_arg(rest, mode_t); va_end(rest);
    REAL(int, open64, const char *, int, ...); FAIL_IF(is_below(p)) return real(p, f, m);
}
int open(const char *p, int f, ...) {
    va_list rest; va_start(rest, f); mode_t m = va_arg(rest, mode_t); va_end(rest);
    REAL(int, open, const char *, int, ...); FAIL_IF(is_below(p)) return real(p, f, m);
}
