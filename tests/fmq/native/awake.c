/* awake.h for a test in Python: reads steps from stdin ("b" or "w NANOSECONDS SLEPT"), and prints the budget, or whether brisk. */
#include <stdio.h>
#include <stdlib.h>

#include "awake.h"

int main(int count, char **arguments)
{
    if (count != 3)
        return 2;
    bool allowed = atoi(arguments[2]);
    struct awake end = {.window_ns = atoll(arguments[1]), .allowed = allowed, .brisk = allowed};
    char step;
    long long ns;
    int slept;
    while (scanf(" %c", &step) == 1) {
        if (step == 'b')
            printf("%lld\n", (long long)awake_budget(&end));
        else if (scanf("%lld %d", &ns, &slept) == 2) {
            awake_waited(&end, ns, slept);
            printf("%d\n", end.brisk);
        } else
            return 1;
    }
    return 0;
}
