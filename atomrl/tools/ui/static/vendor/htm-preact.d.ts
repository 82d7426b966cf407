// What the pages use of htm-preact.js, loosely: a page's own functions are what is checked.
type Ref<T> = { current: T };
export function html(strings: TemplateStringsArray, ...values: any[]): any;
export function render(tree: any, node: Element): void;
export function h(...given: any[]): any;
export function useState<T = any>(initial: T | (() => T)): [T, (next: T | ((old: T) => T)) => void];
export function useEffect(effect: () => any, inputs?: any[]): void;
export function useLayoutEffect(effect: () => any, inputs?: any[]): void;
export function useMemo<T>(make: () => T, inputs?: any[]): T;
export function useRef<T = any>(initial: T): Ref<T>;
export function useCallback<T>(callback: T, inputs?: any[]): T;
