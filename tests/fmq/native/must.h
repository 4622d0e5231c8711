/* A check of a native test. */
#ifndef MUST_H
#define MUST_H

#include <stdio.h>
#include <stdlib.h>

/* Not assert: it must hold in every build. */
#define MUST(condition)                                                                                                \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                                            \
            abort();                                                                                                   \
        }                                                                                                              \
    } while (0)

#endif
